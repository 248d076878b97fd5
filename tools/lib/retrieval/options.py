"""Options that the evaluations of retrieval have in common."""

from tasks.command_line import CONFIG_FLAGS, Parser, at_least


def numbers(text: str) -> list[int]:
    """Reads numbers with commas between them, into their order."""
    return sorted({at_least(1)(number) for number in text.split(",")})


def parser_of(name: str, description: str, *, lengths: str, samples: int) -> Parser:
    """Returns the parser of `tools.evaluate NAME`, with these defaults."""
    prog = f"python -m tools.evaluate {name}"
    parser = Parser(description, epilog=CONFIG_FLAGS, prog=prog)
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--lengths", type=numbers, default=lengths, help=f"in tokens {default}")
    add("--samples", type=at_least(1), default=samples, help=f"of a cell {default}")
    add("--tokenizer", help="bytes, tokenizer.json, .model (default: the corpus's)")
    return parser
