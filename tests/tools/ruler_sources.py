"""Made-up files for RULER's tasks that need some: the same wherever they are made."""

import random
from typing import Any

WORDS = (
    "amber birch cedar delta ember fjord grove heath inlet juniper kelp larch".split()
)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def essays() -> str:
    """Returns 3000 words or so, in sentences."""
    rng = random.Random(1)
    return "\n\n".join(
        f"{words(rng, rng.randint(3, 12)).capitalize()}." for _ in range(400)
    )


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
