"""RULER's prompts are those of the published generator, word by word."""

import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from data.chat.chat_template import open_template
from data.retrieval.lines import FORMS
from data.text.tokens.published import open_tokenizer
from data.text.tokens.tokenizer import ByteTokenizer
from tests.small import chats
from tools.lib.retrieval.prompts import Encoder, Prompt, Room
from tools.lib.ruler.sources import (
    ESSAYS,
    SENTENCE_ENDS,
    Essays,
    Sources,
    read_english_words,
)
from tools.lib.ruler.tasks import SEED, TASKS

FIXTURE = Path(__file__).parents[1] / "fixtures" / "ruler_prompts.json"
LETTERS = Path(__file__).parents[2] / "results" / "ruler" / "names_tokenizer.json"
PUBLISHED = json.loads(FIXTURE.read_text())
RULERS = [name for name in TASKS if name != "lines"]


LINES = {"compact": 100, "letters": 60}
"""Tokens of records of few lines, but for LongEval's."""


def count(draft: Prompt | str) -> int:
    """Counts words and marks, which are the tokens of the fixture."""
    text = draft if isinstance(draft, str) else draft.input + draft.answer_prefix
    return len(re.findall(r"\w+|[^\w\s]+", text))


# Made-up files for tasks that need some: those that the fixture was made with.

WORDS = "amber birch cedar delta ember fjord grove heath inlet juniper kelp larch"
WORDS = WORDS.split()


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def essays() -> str:
    """Returns 3000 words or so, in sentences."""
    rng = random.Random(1)
    made = (words(rng, rng.randint(3, 12)).capitalize() for _ in range(400))
    return "\n\n".join(f"{sentence}." for sentence in made)


def squad() -> dict[str, Any]:
    """Returns 20 articles of 4 paragraphs with a question each, some impossible."""
    rng = random.Random(2)

    def paragraph(name: str) -> dict[str, Any]:
        asked = {"question": f"What is {name}?", "is_impossible": rng.random() < 0.2}
        answers = [{"text": words(rng, 2)}, {"text": words(rng, 1)}]
        text = f"{name} is {words(rng, rng.randint(20, 60))}."
        return {"context": text, "qas": [asked | {"answers": answers}]}

    articles = [[paragraph(f"P{i}-{j}") for j in range(4)] for i in range(20)]
    return {"data": [{"paragraphs": paragraphs} for paragraphs in articles]}


def hotpotqa() -> list[dict[str, Any]]:
    """Returns 20 questions with 10 documents each."""
    rng = random.Random(3)

    def document(number: int) -> list[Any]:
        return [f"Title {number}", [f"{words(rng, 9)}. " for _ in range(3)]]

    return [
        {
            "question": f"Which is {number}?",
            "answer": words(rng, 2),
            "context": [document(10 * number + i) for i in range(10)],
        }
        for number in range(20)
    ]


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Sources:
    # The fixture was made without nltk's model of sentences.
    splitter = "tools.lib.ruler.sources.find_splitter"
    monkeypatch.setattr(splitter, lambda: (SENTENCE_ENDS.split, "marks"))
    made = {ESSAYS: {"text": essays()}, "squad.json": squad()}
    made["hotpotqa.json"] = hotpotqa()
    for name, content in made.items():
        (tmp_path / name).write_text(json.dumps(content))
    haystack, squad_file, hotpotqa_file = (tmp_path / name for name in made)
    return Sources(haystack=haystack, squad=squad_file, hotpotqa=hotpotqa_file)


def ids(row) -> str:
    return f"{row['task']}-{row['length']}"


@pytest.mark.parametrize("row", PUBLISHED["prompts"], ids=ids)
def test_prompts_equal_those_of_the_published_generator(row, sources):
    task = TASKS[row["task"]]
    room = Room(row["length"], task.tokens, count)
    drawn = task.make(SEED, sources).prompts(room, row["samples"])
    found = json.dumps([prompt[:4] for prompt in drawn]).encode()
    assert hashlib.sha256(found).hexdigest() == row["sha256"]


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Encoder:
    """Makes the tokenizer of the fixture's chats, with its template."""
    made = json.loads(LETTERS.read_text("utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for name in chats.LLAMA3:
        number = len(made["model"]["vocab"]) + len(made["added_tokens"]) - 1
        token = {"id": number, "content": name, "special": True, **flags}
        made["added_tokens"].append(token)
    path = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    path.write_text(json.dumps(made), "utf-8")
    tokenizer = open_tokenizer(str(path))
    return Encoder(tokenizer, open_template("llama3", tokenizer))


@pytest.mark.parametrize("row", PUBLISHED["chats"], ids=ids)
def test_chats_have_the_tokens_of_the_published_template(row, chat, sources):
    task = TASKS[row["task"]]
    room = Room(row["length"], task.tokens, chat.count)
    drawn = task.make(SEED, sources).prompts(room, row["samples"])
    found = [[chat(p).tolist(), list(p.outputs), p.length] for p in drawn]
    assert hashlib.sha256(json.dumps(found).encode()).hexdigest() == row["sha256"]


@pytest.mark.parametrize("task", RULERS)
def test_a_length_that_nothing_fits_is_refused_with_one_that_does(task, sources):
    def first(length: int):
        room = Room(length, TASKS[task].tokens, count)
        return next(TASKS[task].make(SEED, sources).prompts(room, 1))

    with pytest.raises(ValueError, match="60 tokens") as error:
        first(60)
    wanted = int(re.search(r"(?:take|least) (\d+)", str(error.value)).group(1))
    assert first(wanted + 40).length <= wanted + 40


def test_long_lists_of_words_need_the_longer_list(tmp_path):
    room = Room(120_000, TASKS["cwe"].tokens, count)
    with pytest.raises(ValueError, match="wonderwords has 8166.*--english-words"):
        next(TASKS["cwe"].make(SEED, Sources()).prompts(room, 1))
    path = tmp_path / "english_words.json"
    path.write_text(json.dumps({str(i): f"word{i}" for i in range(30_000)}))
    words, label = read_english_words(path)
    assert (words[:2], len(words)) == (["word0", "word1"], 30_000)
    assert label.startswith("not RULER's words: english_words.json (sha256 ")
    task = TASKS["cwe"].make(SEED, Sources(english_words=path))
    prompt = next(task.prompts(room, 1))
    assert set(prompt.outputs) <= {*words} and prompt.length <= 120_000


def test_any_text_is_a_haystack_that_says_so(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text('A b c. "D e!"  F\ng? H.')
    essays = Essays.read(path)
    assert essays.label.startswith("not RULER's essays: story.txt (sha256 ")
    found = SENTENCE_ENDS.split(" ".join(essays.words))
    assert found == ["A b c.", '"D e!"', "F g?", "H."]
    again = essays.sentences(len(essays.words) + 3)
    assert " ".join(again) == 'A b c. "D e!" F g? H. A b c.'


@pytest.mark.parametrize("name", FORMS)
def test_lines_are_asked_for_at_five_depths_within_their_length(name):
    """As in the base form of LongEval; lengths count the right answer."""
    task, tokens = TASKS["lines"], LINES.get(name, 1200)
    room = Room(tokens + task.beyond, task.tokens, Encoder(ByteTokenizer()).count)
    drawn = [*task.make(SEED, Sources(form=name)).prompts(room, 10)]
    assert drawn == [*task.make(7, Sources(form=name)).prompts(room, 10)]
    assert [prompt.depth for prompt in drawn] == [0, 0.25, 0.5, 0.75, 1] * 2
    assert len({prompt.input for prompt in drawn}) == 10
    for prompt in drawn:
        (answer,) = prompt.outputs
        whole = prompt.input + prompt.answer_prefix + answer
        assert tokens - 150 < prompt.length == len(whole) <= tokens
        last = re.findall(r"[\w-]+", prompt.answer_prefix.partition(">")[0])[-1]
        number, form = int(re.findall(r"\d+", answer)[-1]), FORMS[name]
        lines = prompt.input.removeprefix(form.header).splitlines(keepends=True)
        size = lines.index("\n")
        line = form.line.format(name=last, number=number)
        assert lines.index(line) == round(prompt.depth * (size - 1))
        assert len({*lines[:size]}) == size
        assert prompt.input.endswith(form.end + form.question.format(name=last))
    if name.startswith("LRT"):
        assert prompt.answer_prefix == f"Line <{last}>: <REGISTER_CONTENT> is"
        assert answer == f" <{number}>\n"
