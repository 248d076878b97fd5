"""Generates text with the newest checkpoint of a run, on the devices of this machine.

    python -m tools.generate --workdir=runs/tiny --prompt "def main("
    python -m tools.generate --workdir=runs/tiny --prompt-file story.txt \\
        --max-tokens 500 --temperature 0.8 --top-p 0.95 --seed 7
    python -m tools.generate --workdir=runs/tiny --config.mesh.fsdp=1 \\
        --config.mesh.ring=8
    python -m tools.generate --workdir=runs/chats --chat --system "Be brief."

The config is the run's own; its mesh may be another (--config.mesh.ring=…). Without
--prompt, each line of the console (or of standard input) is a prompt. The text is
printed token by token, without the prompt. It ends with a stop token of the tokenizer
(see data/text/tokens/tokenizer_files.py), or after --max-tokens. With --samples n, a
prompt is answered n times from one cache of it; the texts are printed once all have
ended.

With --chat a prompt is what the user of a chat says, in the template of the corpus that
the model was trained on, or else of its tokenizer. The text is the reply, which also
ends with the template's end of a turn. Each line is the next turn of one conversation;
an empty line begins a new one. Of several samples, the first goes on.

The KV cache is sharded over the ring and keeps the conversation: for the next turn only
the new tokens are computed. The parameters stay where the mesh puts them.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np

from data.chat.chat_template import FORMATS, OWN, ChatTemplate, open_template
from data.chat.turns import Message
from data.text.tokens.published import open_tokenizer
from data.text.tokens.token_file import TokenFile
from data.text.tokens.tokenizer import ByteTokenizer, TextStream, Tokenizer, begun
from data.text.tokens.tokenizer_files import SAMPLING, read_sampling
from models.decode import Generator, Held
from models.sampling import Sampling
from tasks import corpora
from tasks.command_line import CONFIG_FLAGS, Parser, as_program, at_least
from tasks.generation import config_to_ask, generator, restored_parameters
from tasks.text import TextRun

CHAT: dict[str, Any] = {"nargs": "?", "const": OWN, "choices": (OWN, *FORMATS)}
"""Of the option for a chat's template."""
MAX_TOKENS = 256
"""At most, unless --max-tokens says otherwise."""


@dataclass(frozen=True)
class Chat:
    """A conversation that goes on.

    system: its words; None: the template's, if any.
    messages: what was said since: by the user, and in reply.
    held: of that, what is in the cache.
    """

    template: ChatTemplate
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    held: Held = field(default_factory=Held)

    def encode(self, user: str) -> np.ndarray:
        """Returns the tokens up to where the next reply begins, int32 (n,).

        Raises:
          ValueError: the user says nothing, or what the template refuses.
        """
        if not user.strip():
            raise ValueError("the prompt of a chat must have words, got none")
        asked = [*self.messages, {"role": "user", "content": user.strip()}]
        if self.system is not None:
            asked.insert(0, {"role": "system", "content": self.system})
        return self.template.prompt(asked)


@dataclass(frozen=True)
class Writer:
    """Makes text from a prompt: tokenizer, program and sampling.

    max_tokens: for a prompt; None for what the cache has room for, up to `MAX_TOKENS`.
    chat: the conversation that prompts belong to; None: they are texts to go on from.
    samples: texts for each prompt.
    """

    generator: Generator
    tokenizer: Tokenizer
    max_tokens: int | None
    seed: int
    chat: Chat | None = None
    sampling: Sampling = Sampling()
    samples: int = 1

    def encode(self, prompt: str) -> tuple[np.ndarray, int]:
        """Returns the prompt's tokens, int32 (n,), and how many may follow.

        Raises:
          ValueError: it has none, or does not go into the cache.
        """
        if self.chat:
            tokens = self.chat.encode(prompt)
        else:
            tokens = begun(self.tokenizer, self.tokenizer.encode(prompt))
        room = self.generator.room(len(tokens))
        wanted = self.max_tokens or max(min(MAX_TOKENS, room), 1)
        if room < wanted:
            remedy = "shorten it"
            each = self.generator.samples
            samples = f" of each of {each} samples" if each > 1 else ""
            what = f"the prompt has {len(tokens)} tokens, too many for {wanted} more"
            what += samples
            if self.chat and self.chat.messages:
                remedy = "begin another with an empty line"
                what = f"the conversation has {len(tokens)} tokens by now, too many "
                what += "for a reply"
            elif room > 0:
                remedy = f"ask for at most {room} (--max-tokens)"
            raise ValueError(
                f"{what} in the cache of {self.generator.slots}: {remedy}, or give the "
                "cache more (--cache-tokens)"
            )
        self.generator.check([tokens] * self.generator.rows, wanted)
        return tokens, wanted

    def write(self, parameters: Any, prompt: str, number: int = 0) -> Iterator[str]:
        """Yields the text that follows the prompt, piece by piece.

        Of several samples every piece is empty, up to a last one each: the whole text,
        below its number. What a chat says first becomes part of its conversation when
        all texts have ended.

        number: of the prompt, each of which draws other random numbers.

        Raises:
          ValueError: as `encode`.
        """
        tokens, wanted = self.encode(prompt)
        streams = [TextStream(self.tokenizer, tokens) for _ in range(self.samples)]
        texts = [""] * self.samples
        live = list(range(self.samples))
        stop_tokens = {*self.tokenizer.stop_tokens}
        if self.chat:
            stop_tokens.add(self.chat.template.end)
        drawn = self.generator.generate(
            parameters,
            # The mesh may want several rows: it gets the prompt in each, and they
            # share out the samples.
            [tokens] * self.generator.rows,
            wanted,
            self.seed + number,
            stop_tokens=sorted(stop_tokens),
            held=self.chat and self.chat.held,
        )
        for step in drawn:
            live = [number for number in live if step[number] not in stop_tokens]
            if not live:
                break
            for number in live:
                piece = streams[number].push(int(step[number]))
                texts[number] += piece
                yield piece if self.samples == 1 else ""
        for number, stream in enumerate(streams):
            piece = stream.finish()
            texts[number] += piece
            many = f"sample {number + 1}:\n{texts[number]}\n"
            yield piece if self.samples == 1 else many
        if self.chat:
            for role, words in (("user", prompt), ("assistant", texts[0])):
                self.chat.messages.append({"role": role, "content": words.strip()})


def text_config(arguments: Sequence[str]) -> ml_collections.ConfigDict:
    """Reads the config of a run that makes text; raises ValueError if it makes none."""
    config = config_to_ask(arguments)
    if config.task != "text":
        raise ValueError(f"{config.task=} makes no text: give a config of task 'text'")
    return config


def find_tokenizer(config: ml_collections.ConfigDict, spec: str | None) -> Tokenizer:
    """Opens the tokenizer that is named, or else that of the config's corpus.

    Prompts begin with a token of their own only where the corpus' documents do.

    Raises:
      ValueError, FileNotFoundError: there is no such tokenizer or corpus, or its texts
        have tokens that the model's vocabulary lacks; or nothing says which it is.
    """
    corpus = None
    if spec is None:
        spec = ByteTokenizer.name  # of the default corpus
        for directory in [*corpora.named(config)][:1]:  # all have the same
            corpus = TokenFile.open(directory, "train")
            spec = corpus.tokenizer
        size = 0 if corpus else config.model.vocab_size
        if size >= ByteTokenizer.vocab_size + corpora.VOCAB_MULTIPLE:
            raise ValueError(
                f"{config.workdir} names no corpus to take a tokenizer of, and "
                f"config.model.vocab_size={size} is not that of bytes: give the "
                "directory that imported weights came in (--tokenizer), or bytes"
            )
    tokenizer = open_tokenizer(spec)
    if corpus and int(corpus.tokens[:1][0]) not in tokenizer.begin_of_document:
        tokenizer.begin_of_document = ()
    vocab_size = corpora.vocab_size(config)
    if tokenizer.largest_text_id >= vocab_size:
        raise ValueError(
            f"texts of the tokenizer {spec} have ids up to {tokenizer.largest_text_id},"
            f" but config.model.{vocab_size=}: give the tokenizer that the model was "
            "trained with (--tokenizer, or --config.data.corpus)"
        )
    return tokenizer


def find_template(
    config: ml_collections.ConfigDict, name: str | None, tokenizer: Tokenizer
) -> ChatTemplate | None:
    """Opens the template of a chat: the config's corpus' own, if `name` is `OWN`.

    Raises:
      ValueError: the template is missing, or has tokens that the tokenizer lacks.
    """
    corpus = Path(config.data.corpus) if config.data.corpus else None
    return open_template(name, tokenizer, corpus) if name else None


def find_sampling(options: argparse.Namespace, tokenizer: Tokenizer) -> Sampling:
    """Returns temperature, top_k and top_p: of the options, or else of the model.

    Raises:
      ValueError: its generation_config.json is damaged.
    """
    fields = read_sampling(tokenizer.path) if tokenizer.path else {}
    for name in SAMPLING:
        if getattr(options, name) is not None:
            fields[name] = getattr(options, name)
    return Sampling(**fields, allowed_tokens=tokenizer.vocab_size)


def prepare(resolved: TextRun, options: argparse.Namespace) -> Writer:
    """Returns the writer; computes nothing yet.

    Raises:
      ValueError, FileNotFoundError: something in the options or the config is wrong.
    """
    config = resolved.config
    if options.seed >= 2**31:
        raise ValueError(f"--seed {options.seed} must be from 0 to below 2^31")
    if options.system is not None and options.chat is None:
        raise ValueError("--system is of a chat: give its template too (--chat)")
    tokenizer = find_tokenizer(config, options.tokenizer)
    template = find_template(config, options.chat, tokenizer)
    chat = template and Chat(template, options.system)
    sampling = find_sampling(options, tokenizer)
    rows = resolved.partition.shards("batch")
    samples = -(-options.samples // rows)
    max_tokens = options.max_tokens
    of_others = (samples - 1) * ((max_tokens or MAX_TOKENS) - 1)
    slots = options.cache_tokens or config.data.context_tokens + of_others
    programs = generator(
        resolved, sampling, rows=rows, cache_tokens=slots, samples=samples
    )
    return Writer(
        programs, tokenizer, max_tokens, options.seed, chat, sampling, options.samples
    )


def run(config: ml_collections.ConfigDict, options: argparse.Namespace) -> None:
    """Answers the prompt, or one prompt after the other.

    Raises:
      ValueError, FileNotFoundError: as `prepare`, or there is no checkpoint.
    """
    prompt = options.prompt
    if options.prompt_file:
        try:
            prompt = options.prompt_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{options.prompt_file} is not text: {error}") from error
    resolved = TextRun.of(config, jax.devices())
    writer = prepare(resolved, options)
    if prompt is not None:
        writer.encode(prompt)
    parameters, step = restored_parameters(resolved)
    drawn = writer.sampling
    _say(
        f"step {step} of {config.workdir}; temperature {drawn.temperature:g}, top_k "
        f"{drawn.top_k}, top_p {drawn.top_p:g}; compiling for the first prompt"
    )
    if prompt is not None:
        _show(writer.write(parameters, prompt), writer.samples)
        return
    number = 0
    for line in iter(_next_line, ""):
        if line.strip():
            try:
                texts = writer.write(parameters, line.removesuffix("\n"), number)
                _show(texts, writer.samples)
            except ValueError as error:
                _say(f"error: {error}")
            number += 1
        elif writer.chat:
            writer.chat.messages.clear()


def _next_line() -> str:
    """Returns the next line of the console or of standard input, "" at its end."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def _say(line: str) -> None:
    """Prints all but the text: what was restored, and how long it took."""
    print(line, file=sys.stderr, flush=True)


def _show(pieces: Iterator[str], samples: int) -> None:
    start = time.monotonic()
    first = 0.0
    count = 0
    for piece in pieces:
        print(piece, end="", flush=True)
        first = first or time.monotonic() - start
        count += 1
    print(flush=True)
    # The last piece of each sample is not a token.
    seconds = time.monotonic() - start
    _say(f"{count - samples} tokens in {seconds:.1f} s, the first after {first:.1f} s")


def _options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(__doc__, epilog=CONFIG_FLAGS)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text to continue")
    prompt.add_argument("--prompt-file", type=Path, help="UTF-8 file of that text")
    chat = "prompts are turns of a chat in this template (default: the corpus's or own)"
    parser.add_argument("--chat", **CHAT, help=chat)
    own = "(default: generation_config.json's, or {})"
    for name, kind, words in (
        ("--system", str, "system prompt of a chat"),
        ("--max-tokens", at_least(1), f"longest text (default: {MAX_TOKENS})"),
        ("--temperature", at_least(0, float), f"0: likeliest token {own.format(1)}"),
        ("--top-k", at_least(0), f"draw from the k likeliest; 0: all {own.format(0)}"),
        ("--top-p", float, f"draw from this share of probability {own.format(1)}"),
        ("--cache-tokens", at_least(1), "prompt and texts (default: the config's)"),
        ("--tokenizer", str, "bytes, tokenizer.json, .model (default: the corpus's)"),
    ):
        parser.add_argument(name, type=kind, help=words)
    parser.add_argument("--samples", type=at_least(1), default=1, help="of a prompt")
    parser.add_argument("--seed", type=at_least(0), default=0)
    return parser.parse_known_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    options, rest = _options(arguments)
    config = text_config(rest)
    with contextlib.suppress(KeyboardInterrupt):
        run(config, options)


if __name__ == "__main__":
    sys.exit(main())
