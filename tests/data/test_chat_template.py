"""Templates: the tokens that transformers makes of published ones, and what is learned.

The fixture is written by tests/fixtures/make_chat_templates.py.
"""

import hashlib
import json
import timeit
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from data.chat import renderer
from data.chat.chat_template import (
    FORMATS,
    OWN,
    ChatTemplate,
    format_source,
    open_template,
)
from data.chat.conversation import count_replies, parse_conversation
from data.chat.token_names import MARKS, patterns
from data.text.tokens.published import open_tokenizer
from data.text.tokens.tokenizer import ByteTokenizer
from tests.cases import table
from tests.data.test_tokenizer import make_hugging_face, make_sentence_piece
from tests.small.chats import (
    FAMILIES,
    INST,
    PHI,
    QWEN,
    TOOL_CHATS,
    TOOL_FAMILIES,
    Family,
    talk,
)

BYTES = ByteTokenizer()
FIXTURE = Path(__file__).parents[1] / "fixtures" / "chat_templates.json"
PUBLISHED = json.loads(FIXTURE.read_text("utf-8"))
CONVERSATIONS = PUBLISHED["conversations"]
# Published ones refuse the words of a system, or put them before the last question.
SYSTEM_ELSEWHERE = "gemma", "mistral"
EXCHANGES = (("Hi?", "Hello."), ("Wie heißt 猫?", "Katze 🙂"))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A tokenizer of each family, and others that know every letter.

    They have the same special tokens, but split texts at spaces.
    """
    words = [turn["content"] for turns in CONVERSATIONS for turn in turns]
    of_bytes = {f"{n} of bytes": replace(FAMILIES[n], spaces="") for n in FORMATS}
    found = {}
    for name, family in (FAMILIES | of_bytes).items():
        directory = tmp_path_factory.mktemp("family")
        found[name] = family.save(directory, words)
        names = {"bos_token": family.bos, "eos_token": family.eos}
        (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return found


@pytest.fixture(scope="module")
def mistral_model(tmp_path_factory):
    """A SentencePiece model of Mistral's third kind: it puts a space before texts."""
    path = tmp_path_factory.mktemp("mistral") / "tokenizer.model"
    return make_sentence_piece(path, control_symbols=[*INST])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A tokenizer that knows every letter, with the special tokens of Qwen."""
    path = tmp_path_factory.mktemp("qwen") / "tokenizer.json"
    return open_tokenizer(str(make_hugging_face(path, QWEN)))


def template(name, path):
    return open_template(name, open_tokenizer(str(path)))


def encoded(template, system, exchanges):
    (document,) = template.documents(talk(system, *exchanges))
    return document


def digest(ids):
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:12]


@pytest.mark.parametrize("name", PUBLISHED["templates"])
def test_tokens_are_those_of_transformers(paths, name):
    one = template(name.replace("gemma3", "gemma"), paths[name])
    differ = set()
    wanted = PUBLISHED["templates"][name]["digests"]
    assert len(wanted) == 50
    for turns, digests in zip(CONVERSATIONS, wanted, strict=True):
        bare = turns[len(turns) % 2 :]
        found = []
        for messages in (turns, bare):
            (document,) = one.documents(messages)
            found += [document.tokens, one.prompt(messages[:-1])]
        if [*map(digest, found)] != digests:
            assert [*map(digest, found[2:])] == digests[2:]
            differ.add(turns[0]["role"])
    assert differ == ({"system"} if name in SYSTEM_ELSEWHERE else set())


CHATS_WITH_TOOLS = [json.loads(line) for line in TOOL_CHATS.read_text().splitlines()]
ALWAYS = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
OF_TOOLS = {
    "llama3.1": ("llama", ""),
    "qwen2.5-tools": ("qwen", f"{{% set always = '{ALWAYS}' %}}"),
    "qwen3": ("qwen", "{% set thinks = true %}{% set takes_text = true %}"),
    "qwen3-2507": ("qwen", "{% set takes_text = true %}"),
    "mistral-nemo": ("mistral", ""),
    "mistral-7b-v0.3": ("mistral", "{% set blank = ' ' %}"),
    "phi4-mini": ("phi", ""),
    "deepseek": ("deepseek", ""),
}
"""Published templates that write calls, in our own words: files, and what they set."""


@pytest.mark.parametrize("name", OF_TOOLS)
def test_calls_and_thoughts_are_learned_as_transformers_writes_them(tmp_path, name):
    """Ids and learned ids of each reply, of ten conversations as people have them."""
    path = TOOL_FAMILIES[name].save(tmp_path, [TOOL_CHATS.read_text()])
    names = {"bos_token": TOOL_FAMILIES[name].bos, "eos_token": TOOL_FAMILIES[name].eos}
    path.with_name("tokenizer_config.json").write_text(json.dumps(names))
    file, settings = OF_TOOLS[name]
    source = (TOOL_CHATS.parent / "tool_templates" / f"{file}.jinja").read_text()
    one = ChatTemplate(name, settings + source, open_tokenizer(str(path)))
    refused = 0
    for row, wanted in zip(CHATS_WITH_TOOLS, PUBLISHED["tools"][name], strict=True):
        (chat,) = parse_conversation(row, "f").paths
        weights = range(1, count_replies(chat.messages) + 1)
        try:
            documents = one.documents(chat.messages, weights, chat.tools)
        except ValueError:
            refused += 1
            # Mistral's own would ask with the system's words, and answer without them.
            assert not wanted or (name, row["id"]) == ("mistral-nemo", 1)
            continue
        found = []
        for weight in weights:
            (text,) = [d for d in documents if weight in d.loss_weights]
            (learned,) = np.nonzero(text.loss_weights == weight)
            found.append([text.tokens[: learned[-1] + 1], text.tokens[learned]])
        assert [[*map(digest, reply)] for reply in found] == wanted
    assert refused == {"mistral-nemo": 2, "llama3.1": 1, "phi4-mini": 1}.get(name, 0)


def test_mistral_has_the_space_that_its_tokenizer_adds(mistral_model):
    """<s>[INST] the mat\\n\\nthe cat[/INST] sat</s>[INST] the log[/INST] on</s>."""
    one = template("mistral", mistral_model)
    begin, end = map(one.tokenizer.token_id, ("[INST]", "[/INST]"))
    texts = "the mat\n\nthe cat", "sat", "the log", "on"
    first, sat, second, on = map(one.tokenizer.encode, texts)
    tokens = [1, begin, *first, end, *sat, 2, begin, *second, end, *on, 2]
    with_spaces = format_source("mistral").replace("[INST]", "[INST] ")
    for made in one, ChatTemplate("spaced", with_spaces, one.tokenizer):
        document = encoded(made, "the mat", [("the cat", "sat"), ("the log", "on")])
        assert document.tokens.tolist() == tokens
        learned = document.tokens[document.weights]
        assert learned.tolist() == [*sat, 2, *on, 2]
    assert one.tokenizer.decode(tokens) == " ".join(texts)


def test_conversations_begin_with_the_tokenizers_own_token_once(paths, mistral_model):
    """Also where Gemma has a tag of HTML that others begin with, and no file says."""
    gemma, names = paths["gemma"].with_name("a.json"), ("<eos>", "<s>", "<bos>", "</s>")
    for path, begin in (
        (make_hugging_face(gemma, names), "<bos>"),
        (mistral_model, "<s>"),
        (paths["llama3"], "<|begin_of_text|>"),
    ):
        one = template("vicuna", path)
        begin = one.tokenizer.token_id(begin)
        tokens = encoded(one, "the cat", EXCHANGES).tokens
        assert np.flatnonzero(tokens == begin).tolist() == [0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("system", [None, "", "Sei kürzer."])
def test_a_prompt_is_what_precedes_the_reply_in_training(paths, name, system):
    one = template(name, paths[name])
    exchanges = [("the cat", "sat"), ("on the", "log"), ("{user} ?", "mat")]
    whole = encoded(one, system, exchanges)
    changes = np.diff(np.append(whole.weights, False).astype(int))
    starts, ends = np.flatnonzero(changes == 1) + 1, np.flatnonzero(changes == -1)
    assert starts.size == ends.size == 3
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        said = talk(system, *exchanges[:number])
        prompt = one.prompt([*said, {"role": "user", "content": exchanges[number][0]}])
        assert prompt.tolist() == whole.tokens[:start].tolist()
        assert prompt.dtype == np.int32
        reply = one.tokenizer.decode(whole.tokens[start:end])
        assert reply.strip() == exchanges[number][1]
        assert whole.tokens[end] == one.end


@pytest.mark.parametrize("name", FORMATS)
def test_names_of_special_tokens_in_words_are_text(paths, name):
    one = template(name, paths[f"{name} of bytes"])
    special = one.tokenizer.special
    words = "".join(special) + "".join(name[:3] + name for name in special) + "\nObey"

    def tokens(words):
        return encoded(one, words, [(words, words), (words, words)]).tokens

    found, plain = tokens(words), tokens("x")
    ids = [*special.values()]
    assert found[np.isin(found, ids)].tolist() == plain[np.isin(plain, ids)].tolist()
    assert one.tokenizer.decode(found).count(words) == 5


@pytest.mark.parametrize("name", [n for n in FORMATS if len(FORMATS[n]) > 1])
def test_a_tokenizer_without_the_templates_tokens_is_refused(paths, name):
    with pytest.raises(ValueError, match=f"template {name} needs: take that of"):
        open_template(name, BYTES)
    other = "gemma" if name == "llama3" else "llama3"
    with pytest.raises(ValueError, match="huggingface tokenizer has no token [<[]"):
        template(name, paths[other])


def test_a_tokenizer_that_reads_tokens_in_words_is_refused(tmp_path):
    turns = ["<start_of_turn>", "<end_of_turn>"]
    path = make_sentence_piece(
        tmp_path / "gemma.model", control_symbols=["<bos>"], user_defined_symbols=turns
    )
    match = "takes <start_of_turn> in a text for the token .*added_tokens have it"
    with pytest.raises(ValueError, match=match):
        template("gemma", path)
    path = make_hugging_face(tmp_path / "tokenizer.json", QWEN)
    made = tokenizers.Tokenizer.from_file(str(path))
    text = made.to_str().replace('"special":true', '"special":false')
    path.write_text(text)
    with pytest.raises(ValueError, match=r"takes <\|im_start\|> in a text"):
        template("chatml", path)
    with pytest.raises(ValueError, match="no special token behind a reply, but '<.im_"):
        ChatTemplate("q", CHATML, open_tokenizer(str(path)))


CHATML = format_source("chatml")


def test_a_template_of_its_own_has_all_that_published_ones_use(qwen):
    """The text is what transformers 5.23 renders."""
    parts = (FIXTURE.parents[1] / "cases" / "all_of_jinja.jinja").read_text()
    one = ChatTemplate("parts", parts, qwen)
    year = datetime.now().year
    text = (
        '{"a": "<é>", "b": [1, null]}[\n 2\n]'
        + f"{year}<|im_start|>user\nHi?<|im_end|>"
        "<|im_start|>assistant\n0"
    )
    prompt = one.prompt([{"role": "user", "content": " Hi?\n"}])
    whole = tokenizers.Tokenizer.from_file(str(qwen.path))
    whole.no_padding()
    whole.no_truncation()
    assert prompt.tolist() == whole.encode(text, add_special_tokens=False).ids


REWRITES = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if "
    "loop.last or m.role == 'user' else '…' }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_replies_that_a_conversation_writes_otherwise_are_documents(qwen):
    """Here a reply that is not the last is left out."""
    one = ChatTemplate("rewrites", REWRITES, qwen)
    documents = one.documents(talk(None, *EXCHANGES, ("x", "y")))
    learned = [d.tokens[d.weights] for d in documents]
    replies = [f"{one.tokenizer.decode(tokens)}" for tokens in learned]
    assert replies == ["Hello.", "Katze 🙂", "y"]
    shown = [one.tokenizer.decode(d.tokens) for d in documents]
    first, second = "user\nHi?assistant\n", "user\nWie heißt 猫?assistant\n"
    assert shown == [
        f"{first}Hello.",
        f"{first}…{second}Katze 🙂",
        f"{first}…{second}…user\nxassistant\ny",
    ]


@pytest.mark.parametrize(
    "written, learned", [("\n", "cat<|end|>"), ("<|system|>", "cat<|end|>")]
)
def test_a_reply_may_begin_in_the_blanks_of_a_token_or_behind_a_token(
    tmp_path, written, learned
):
    """The token before is then part of the prompt, and so is what is always written."""
    phi = Family(PHI, "<s>", "<|endoftext|>", strips=True)
    tokenizer = open_tokenizer(str(phi.save(tmp_path, ["the cat sat"] * 3)))
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{{ '@' if m.role == 'assistant' }}"
        "{{ m.content }}<|end|>{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt }}"
    ).replace("@", written)
    one = ChatTemplate("phi", source, tokenizer)
    (document,) = one.documents(talk(None, ("a", "cat"), ("b", "cat")))
    found = document.tokens[document.weights]
    names = {token: name for name, token in tokenizer.special.items()}
    shown = [names.get(token) or tokenizer.decode([token]) for token in found.tolist()]
    assert "".join(shown) == 2 * learned


def test_blanks_beside_a_token_that_does_not_take_them_stay():
    source = "{% for m in messages %}{{ m.content }} {{ eos_token }}  {% endfor %}"
    (document,) = ChatTemplate("x", source, BYTES).documents(talk(None, ("a", "b")))
    assert document.tokens.tolist() == [*b"a ", 256, *b"  b ", 256, *b"  "]


def test_blanks_before_a_token_that_takes_them_are_looked_at_once(monkeypatch):
    """And all are taken. 16 times as many do not cost 256 times as much."""
    strips = {"<end>": (True, True), "<cut>": (True, False)}
    monkeypatch.setattr(BYTES, "strips", strips, raising=False)
    monkeypatch.setattr(BYTES, "special", {"<end>": 256, "<cut>": 255}, raising=False)
    _, special = patterns(BYTES, BYTES.special)
    expected = ["", "\n <end>  ", "", "<cut>", " a", "  <cut>", " b"]
    assert special.split("\n <end>  <cut> a  <cut> b") == expected

    def seconds(count):
        blanks = " " * count + "x"
        return min(timeit.repeat(lambda: special.split(blanks), number=1))

    assert seconds(64_000) < 100 * seconds(4000)


def test_no_token_lies_over_the_border_of_a_prompt(qwen):
    source = "{% for m in messages %}{{ m.content }}"
    source += "{{ '<|im_end|>' if m.role == 'assistant' }}{% endfor %}"
    one = ChatTemplate("x", source, qwen)
    (document,) = one.documents(talk(None, ("the ca", "t sat")))
    prompt, reply = map(qwen.encode, ("the ca", "t sat"))
    assert qwen.encode("the cat sat").size < prompt.size + reply.size
    assert document.tokens.tolist() == [*prompt, *reply, one.end]
    assert document.weights.tolist() == [False] * prompt.size + [True] * (
        reply.size + 1
    )


def test_conversations_are_refused_in_a_line(qwen):
    refuses = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('it\nsays no') }}"
        "{% endif %}{% if messages[0].content == 'bad' %}{{ messages + 1 }}{% endif %}"
    )
    one = ChatTemplate("it", refuses + CHATML, qwen)
    (document,) = one.documents(talk(None, *EXCHANGES))
    assert document.weights.sum() > 4
    concatenates = 'can only concatenate list (not "int") to list'
    for words, why in ("no", "it says no"), ("bad", concatenates):
        with pytest.raises(ValueError) as refused:
            one.documents(talk(None, (words, "a")))
        said = f"the chat template it refuses the conversation: {why}"
        assert str(refused.value) == said
    with pytest.raises(ValueError, match="template it refuses .*: it says no"):
        one.prompt([{"role": "user", "content": "no"}])
    with pytest.raises(ValueError, match="all 32 Unicode noncharacters"):
        one.prompt([{"role": "user", "content": "".join(MARKS)}])
    assert not one.stays_text([{"role": "user", "content": "".join(MARKS)}])
    nearly = "".join(MARKS[1:]) + "<|im_end|>"
    tokens = one.prompt([{"role": "user", "content": nearly}])
    assert nearly in one.tokenizer.decode(tokens)


@pytest.mark.parametrize(
    "source, complaint",
    [
        *table("data.txt", "template"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "x is not Jinja: .* recursion"),
        ("{% for a in a %}" * 50 + "{% endfor %}" * 50, "x is not Jinja: too many sta"),
    ],
)
def test_templates_that_cannot_be_used_are_refused_in_a_line(source, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        ChatTemplate("x", source, BYTES)
    assert str(caught.value).isprintable()


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
        "{% set n = namespace(a=(1,), b=(1,)) %}{% for i in range(60) %}{% set n.a = "
        "(n.a, n.a) %}{% set n.b = (n.b, n.b) %}{% endfor %}{{ n.a == n.b }}",
        "{{ 9999 ** 9999999 }}",
        "{{ range(9)|slice(10**10)|list }}",
    ],
)
def test_a_rendering_has_a_limit_of_cpu_seconds(source, monkeypatch, qwen):
    """The next one goes on in another process."""
    monkeypatch.setattr(renderer, "CPU_SECONDS", 1)
    with pytest.raises(ValueError, match="template x takes more than 1 CPU seconds"):
        ChatTemplate("x", source, BYTES)
    assert ChatTemplate("x", CHATML, qwen).documents(talk(None, *EXCHANGES))


def test_an_answer_that_nobody_waited_for_is_not_the_next_ones(qwen):
    one = ChatTemplate("x", CHATML, qwen)
    wanted = one.prompt(talk(None, *EXCHANGES)[:1]).tolist()

    class Interrupted:
        def readline(self):
            raise KeyboardInterrupt

        def close(self):
            pass

    process = renderer.RENDERER._process
    with process.stdout:
        process.stdout = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            one.prompt([{"role": "user", "content": "other"}])
    assert one.prompt(talk(None, *EXCHANGES)[:1]).tolist() == wanted


def test_long_conversations_are_rendered_twice(monkeypatch, paths):
    """What is made of these two is what is made of a rendering for each turn."""
    exchanges = [(f"question {n}", f"answer {n}") for n in range(200)]
    for name in set(FORMATS) - {"olmo2"}:  # which looks whether a turn is the last
        one, renderings = template(name, paths[name]), renderer.RENDERER
        before = renderings.count
        (found,) = one.documents(talk("S", *exchanges))
        assert renderings.count == before + 2
        assert np.diff(found.weights != 0, prepend=0).tolist().count(1) == 200
    few = talk("S", *exchanges[:5])
    render = renderings.render

    def each(*asked):
        return render(*asked)._replace(ends=None)

    for name in FORMATS:
        one = template(name, paths[name])
        (found,), prompt = one.documents(few), one.prompt(few[:-1])
        monkeypatch.setattr(renderings, "render", each)
        (wanted,) = one.documents(few)
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found.weights.tolist() == wanted.weights.tolist()
        assert prompt.tolist() == one.prompt(few[:-1]).tolist()
        monkeypatch.undo()


HEAD = "{% for m in messages %}<|turn|>{{ m.role }}\n"
ASK = "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
THOUGHT = "<think>hm</think>cat"
TEMPLATES = {
    "end behind the last": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}{{ 'assistant: ' if add_generation_prompt else '<|stop|>' }}",
    "empty thoughts": HEAD + "{% if m.role == 'assistant' and loop.last and "
    "'</think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    "<|stop|>\n{% endfor %}" + ASK,
    "drops thoughts": HEAD + "{{ m.content if loop.last else "
    "m.content.split('</think>')[-1] }}<|stop|>\n{% endfor %}" + ASK,
    "no prompt": HEAD + "{{ m.content }}<|stop|>\n{% endfor %}",
    "opens thoughts": HEAD + "{{ m.content }}<|stop|>\n{% endfor %}"
    "{{ '<|turn|>assistant\n<think>' if add_generation_prompt }}",
    "rewrites thoughts": HEAD
    + "{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
    "<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1] }}\n</think>"
    "{{ m.content.split('</think>')[-1] }}{% endif %}<|stop|>\n{% endfor %}" + ASK,
    "last turn alone": "A: {% if not add_generation_prompt %}{{ messages[-1].content }}"
    "<|stop|>{% endif %}",
}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    "name, reply, learned",
    [
        ("end behind the last", "cat", "cat\n<|stop|>"),
        ("empty thoughts", "cat", "cat<|stop|>"),
        ("empty thoughts", THOUGHT, THOUGHT + "<|stop|>"),
        ("drops thoughts", THOUGHT, THOUGHT + "<|stop|>"),
        ("no prompt", "cat", "cat<|stop|>"),
        ("opens thoughts", THOUGHT, "hm</think>cat<|stop|>"),
        ("rewrites thoughts", THOUGHT, "<think>\nhm\n</think>cat<|stop|>"),
        ("last turn alone", "cat", "cat<|stop|>"),
    ],
)
def test_each_reply_is_learned_once_without_what_the_template_adds(
    tmp_path, thinks, name, reply, learned
):
    """Whether its thoughts are between special tokens or between letters."""
    special = ["<eos>", "<|stop|>", "<|turn|>"] + ["<think>", "</think>"] * thinks
    path = Family(special, None, "<|stop|>").save(tmp_path, ["the cat sat"])
    tokenizer = open_tokenizer(str(path))
    one = ChatTemplate(name, TEMPLATES[name], tokenizer)
    turns = talk(None, *[(f"<think> {n}", reply) for n in range(4)])
    found = []
    for document in one.documents(turns, [1, 2, 3, 4]):
        for weight in np.unique(document.weights[document.weights > 0]):
            tokens = document.tokens[document.weights == weight].tolist()
            names = map(tokenizer.token_name, tokens)
            found.append((weight, "".join(names).replace("Ċ", "\n")))
            assert ("<think>" in map(tokenizer.token_name, tokens)) == (
                thinks and learned.startswith("<think>")
            )
    assert sorted(found) == [(n, learned) for n in range(1, 5)]
    # The words of others have no tokens of these names.
    prompt = one.prompt(turns[:1]).tolist()
    assert prompt.count(tokenizer.token_id("<think>")) == (
        thinks and name == "opens thoughts"
    )
    if name != "last turn alone":
        assert one.tokenizer.decode(prompt).split("assistant")[0].startswith("user")
        assert "assistant" in one.tokenizer.decode(prompt)


DROPS = HEAD + (
    "{{ m.thinking if loop.last or messages[-1].role == 'tool' }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.arguments|tojson }}<|call|>\n{% else %}"
    "{{ '=' + m.content }}<|stop|>\n{% endif %}{% endfor %}"
)
CLOSES = "{% if add_generation_prompt %}<|turn|>assistant\n<think></think>{% endif %}"
THINKS = HEAD + (
    "{{ '<think>' + (m.thinking or '') + '</think>' if m.role == 'assistant' }}"
    "{{ m.tool_calls[0].function.arguments if m.tool_calls else m.content }}"
    "<|stop|>\n{% endfor %}"
)


@pytest.mark.parametrize(
    "source, learned",
    [
        (DROPS + ASK, ['hm{"a": 1}<|call|>', "=cat<|call|><|stop|>"]),
        (THINKS + CLOSES, ['hm</think>{"a": 1}<|stop|>', "cat<|call|><|stop|>"]),
    ],
)
def test_calls_end_otherwise_and_thoughts_of_earlier_turns_are_dropped(
    tmp_path, source, learned
):
    """Or a reply has thoughts where the template asks for one without."""
    family = Family(["<eos>", "<|stop|>", "<|turn|>", "<|call|>"], None, "<|stop|>")
    tokenizer = open_tokenizer(str(family.save(tmp_path, ["the cat sat"])))
    one = ChatTemplate("x", source, tokenizer)
    turns = talk(None, ("a", ""), ("b", "cat<|call|>"))
    turns[1] |= {"reasoning": "hm", "tool_calls": [{"function": {"name": "f"}}]}
    turns[1]["tool_calls"][0]["function"]["arguments"] = {"a": 1}
    turns[2] = {"role": "tool", "content": "mat<|call|>"}
    found = []
    for document in one.documents(turns, [1, 2]):
        for weight in {*document.loss_weights[document.loss_weights > 0].tolist()}:
            tokens = document.tokens[document.loss_weights == weight]
            words = "".join(map(tokenizer.token_name, tokens.tolist()))
            calls = int(np.sum(tokens == tokenizer.token_id("<|call|>")))
            found.append((weight, words.replace("Ġ", " "), calls))
    assert sorted(found) == [(1, learned[0], "call" in learned[0]), (2, learned[1], 0)]


def test_a_reply_may_begin_in_the_blanks_of_the_token_that_ends_the_turn_before(
    tmp_path,
):
    phi = Family(PHI, "<s>", "<|endoftext|>", strips=True)
    tokenizer = open_tokenizer(str(phi.save(tmp_path, ["the cat sat"] * 3)))
    source = "{% for m in messages %}{{ '\n' if m.role == 'assistant' }}"
    one = ChatTemplate("x", source + "{{ m.content }}<|end|>{% endfor %}", tokenizer)
    (document,) = one.documents(talk(None, ("a", "cat"), ("b", "cat")))
    assert tokenizer.decode(document.tokens[document.weights]) == "catcat"


def test_a_template_that_asks_within_its_loop_is_refused():
    source = "{% for m in messages %}{{ '@' if add_generation_prompt }}{{ m.content }}"
    one = ChatTemplate("x", source + "{{ eos_token }}{% endfor %}", BYTES)
    with pytest.raises(ValueError, match="writes a reply otherwise"):
        one.documents(talk(None, ("a", "b"), ("c", "d")))


LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"
KEPT = "{% set n = namespace() %}@{% for m in messages %}{% set n.x = m.content %}"
KEPT += "{% endfor %}"


@pytest.mark.parametrize(
    "source, is_in_order",
    [
        (LOOP, True),
        ("{% set t = messages[1:] %}" + LOOP.replace("messages", "t"), True),
        (LOOP.replace("m.content", "m.content, messages[loop.index0]"), True),
        (LOOP.replace("m.content", "m.content, loop.last"), False),
        (LOOP.replace("m.content", "m.content, loop['last']"), False),
        (LOOP.replace("m.content", "m.content, messages[loop.index]"), False),
        (LOOP.replace("m.content", "messages|length"), False),
        (LOOP.replace("m.content", "messages|map(attribute='role')|first"), True),
        (LOOP.replace("m.content", "messages|selectattr('role')|list"), False),
        (LOOP.replace("m.content", "messages|tojson"), False),
        (LOOP.replace("m.content", "messages"), False),
        (LOOP.replace("m.content", "messages is sequence"), False),
        (LOOP.replace("m.content", "messages == [1]"), False),
        (LOOP.replace("messages", "messages[2:]"), False),
        (LOOP.replace("{% endfor", "{% break %}{% endfor"), False),
        (LOOP.replace("messages", "messages[1:]") + "{{ 1 if messages[1:] }}", False),
        (LOOP.replace("{% endfor", "{% else %}x{% endfor"), False),
        (LOOP + LOOP, False),
        (LOOP + "{{ messages[0].role }}", False),
        ("{% set n = namespace() %}" + LOOP + "{{ n.x }}", False),
        ("{% set eos_token = joiner() %}" + LOOP + "{{ eos_token() }}", False),
        ("{% set t = [1, 2] %}{% for i in t %}" + LOOP + "{% endfor %}", False),
        (
            "{% set t = [1] %}"
            + KEPT.replace("@", "{% for i in t %}")
            + "{{ n.x }}{% endfor %}",
            0,
        ),
        (
            "{% macro f() %}{{ n.x }}{% endmacro %}"
            + KEPT.replace("@", "")
            + "{{ f() }}",
            0,
        ),
        ("{% if messages[1] %}x{% endif %}" + LOOP, False),
        ("{% if messages[1:] %}x{% endif %}" + LOOP, False),
        ("{{ (messages[1:]|first).role }}" + LOOP, False),
    ],
)
def test_templates_that_look_ahead_are_rendered_for_each_turn(source, is_in_order):
    options = {"eos_token": ""}
    turns = talk(None, *EXCHANGES)
    whole = renderer.RENDERER.render(source, turns, options)
    assert (whole.ends is not None) == is_in_order
    for number, end in enumerate(whole.ends or (), 1):
        part = renderer.RENDERER.render(source, turns[:number], options)
        assert part.text == whole.text[:end] + whole.text[whole.ends[-1] :]


def test_a_template_whose_replies_differ_from_its_prompts_is_refused():
    """As those of Mistral that have a system's words in the last turn of a user."""
    source = (
        "{% for m in messages %}{{ 'S' if loop.last and m.role == 'user' }}"
        "{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    )
    one = ChatTemplate("x", source, BYTES)
    with pytest.raises(ValueError, match="x writes a reply otherwise than where it as"):
        one.documents(talk(None, ("a", "b")))
    asks = source.replace(
        "{{ m.content", "{{ '@' if m.role == 'assistant' }}{{ m.content"
    )
    asks += "{{ '@' if add_generation_prompt }}"
    with pytest.raises(ValueError, match="x writes a reply otherwise than where it as"):
        ChatTemplate("x", asks, BYTES).documents(talk(None, ("a", "b")))
    thinks = source.replace("'S' if loop.last and m.role == 'user'", "''")
    thinks += "{{ '<think>' if add_generation_prompt }}"
    with pytest.raises(ValueError, match="with '<think>': take that out of what it ad"):
        ChatTemplate("x", thinks, BYTES).documents(talk(None, ("a", "b")))


def test_the_corpus_and_then_the_tokenizers_files_have_the_template(tmp_path):
    directory, corpus = tmp_path / "model", tmp_path / "corpus"
    directory.mkdir(), corpus.mkdir()
    path = make_hugging_face(directory / "tokenizer.json", QWEN)
    tokenizer = open_tokenizer(str(path))

    def source(corpus=None):
        return open_template(OWN, tokenizer, corpus).source

    match = f"there is no chat template in {directory}: name one of vicuna"
    with pytest.raises(ValueError, match=match):
        source()
    with pytest.raises(ValueError, match="no chat template in the bytes tokenizer: n"):
        open_template(OWN, BYTES)
    with pytest.raises(ValueError, match=f"template in {corpus} or {directory}: n"):
        source(corpus)
    sources = [f"{CHATML}{{# {number} #}}\r\n" for number in range(4)]
    found = [json.dumps({"chat_template": one}) for one in sources[:2]] + sources[2:]
    files = [directory / "chat_template.json", directory / "tokenizer_config.json"]
    files += [directory / "chat_template.jinja", corpus / "chat_template.jinja"]
    for path, text, expected in zip(files, found, sources, strict=True):
        path.write_bytes(text.encode())
        assert source(corpus) == expected
    assert source() == sources[2]
    assert open_template("qwen2", tokenizer, corpus).name == "qwen2"
    (directory / "chat_template.jinja").unlink()
    several = [dict(name="rag", template="x"), dict(name="default", template=CHATML)]
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": several}))
    assert source() == CHATML
    for wrong in (several[:1], 7):
        config.write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(ValueError, match="tokenizer_config.json has no chat_templ"):
            source()
    (corpus / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="chat_template.jinja is not text"):
        source(corpus)
