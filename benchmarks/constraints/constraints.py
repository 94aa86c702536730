"""Instructions whose fulfilment a rule can check: what to write about, how, and the checks.

The kinds are 22 of the 25 kinds of IFEval (https://huggingface.co/papers/2311.07911), two of them
split into upper and lower limits. Wordings, topics and checks are our own. The last wording of each
kind is held out, and so are topics.
"""

import json
import random
import re
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

TASKS = (
    "Write a short note about {}.|Tell me something about {}.|Describe {} to a child.|Write "
    "an ad for {}.|Write a letter to a friend about {}.|Give advice to someone who is new to "
    "{}.|What is good about {}?|Write a poem on {}.|Write a blog post on {}.|Explain why "
    "people care about {}.|Write a tweet about {}.|Write a story in which {} matters.|Can "
    "you write an essay on {}?|Write a song about {}.|Draft an email about {}.|What are the "
    "pros and cons of {}?|I want to know more about {}.|Write a riddle about {}.|Write a "
    "product description for {}.|Write a dialogue between two people about {}."
).split("|")
TOPICS = (
    "bread|rivers|old maps|chess|night trains|gardening|sleep|honey "
    "bees|volcanoes|running|paper|public libraries|tea|the moon|bicycles|dogs|saving "
    "money|learning to swim|winter|clocks|photography|football|street markets|soap|the sea|job "
    "interviews|a lost key|birds|cooking rice|moving house|a small museum|mountain huts|video "
    "calls|jazz|the first day at school|coffee shops|electric cars|a startup|Roman roads|the "
    "weather in Iceland|yoga|a resume|computer science|snakes|a wedding|basketball|ancient "
    "Egypt|healthy food|a summer camp|math homework|grandparents|a new phone|space "
    "travel|camping|the violin|a dinner party"
).split("|")
HELD_OUT_TOPICS = (
    "lighthouses|cheese|being on time|owls|first aid|pianos|the "
    "desert|neighbors|recycling|kites|a broken phone|spices"
).split("|")
WORDS = (
    "time people water light small river work happy morning simple strong quiet friend story change"
).split()
# of titles and highlights; a copy does not count
EXAMPLES = "this|this part|highlighted text|a good day"
ENDINGS = "That is all I know.|Is there anything else?|Now it is your turn.|Thank you for reading."


class Constraint(NamedTuple):
    """A kind of instruction."""

    wordings: list[str]  # with a place for the value; the last one is held out
    values: list
    check: Callable[[str, str], bool]  # whether a text fulfils it
    progress: Callable[[str, str], float]  # how far, from 0 to 1; 1 wherever the check holds


def counter(pattern: str, flags: int = 0) -> Callable[[str], int]:
    """How often a pattern occurs."""
    return lambda text: len(re.findall(pattern, text, flags))


def paragraphs(text: str, mark: str) -> int:
    """Parts that are not empty."""
    return sum(bool(part.strip()) for part in text.split(mark))


def is_json(text: str) -> bool:
    """Whether a text is JSON, perhaps in a code block."""
    try:
        json.loads(re.sub(r"^```(json)?|```$", "", text.strip(), flags=re.IGNORECASE))
    except ValueError:
        return False
    return True


def without(times: int) -> float:
    """Progress where nothing of a kind is allowed: each costs a quarter."""
    return max(1 - times / 4, 0)


def share_of(count: int, value: str) -> float:
    """Progress where at least a number is asked for."""
    return min(count / int(value), 1)


def nearness(count: int, value: str) -> float:
    """Progress where exactly a number is asked for."""
    return max(1 - abs(count / int(value) - 1), 0)


def below(count: int, value: str) -> float:
    """Progress where fewer than a number are asked for: each one too many costs its share."""
    return min(count, 1) * max(1 - max(count - int(value) + 1, 0) / int(value), 0)


def ended(text: str) -> str:
    """A text as its ending is read."""
    return text.strip().strip('"').lower()


def shared_end(text: str, value: str) -> float:
    """Share of a phrase, word by word, with which a text ends."""
    phrase = value.lower().split()
    return max(
        (
            n / len(phrase)
            for n in range(1, len(phrase) + 1)
            if ended(text).endswith(" ".join(phrase[:n]))
        ),
        default=0,
    )


def shared_start(text: str, value: str) -> int:
    """Number of first characters that are the same."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(text, value))))


def has_postscript(text: str, mark: str) -> bool:
    """Whether a text has the mark, and not only as the end of a longer one."""
    return bool(re.search(rf"(?<![\w.]){re.escape(mark)}", text))


words = counter(r"\w+")
quoted = re.compile(r'\s*".*"\s*', re.DOTALL)
sentences = counter(r"[.!?]+[\"')*]*(\s|$)")
bullets = counter(r"^\s*[*-]\s", re.MULTILINE)
highlights = counter(rf"(\*\*?)(?!({EXAMPLES})\*)(?=\S)[^\n*]+\1")
title = re.compile(rf"<<(?!({EXAMPLES})>>)[^\n]*\w[^\n]*>>")
blanks = counter(r"\[[^\]]*\]")
capitals = counter(r"\b[A-Z][A-Z]+\b")
sections = counter(r"SECTION \d+")

CONSTRAINTS = {
    "no commas": Constraint(
        [
            "Do not use any commas.",
            "Your answer must not contain a comma.",
            "Avoid commas altogether.",
            "Leave out all commas in your reply.",
            "There should be no comma anywhere in the text.",
            "Write it without commas.",
        ],
        [""],
        lambda text, _: "," not in text,
        lambda text, _: without(text.count(",")),
    ),
    "lowercase": Constraint(
        [
            "Use only lowercase letters.",
            "Your whole answer should be in lowercase, with no capital letters.",
            "No capital letters are allowed in your reply.",
            "Write everything in English and in lowercase.",
            "Do not capitalize anything.",
        ],
        [""],
        lambda text, _: text.islower(),
        lambda text, _: without(sum(map(str.isupper, text))) * any(map(str.islower, text)),
    ),
    "uppercase": Constraint(
        [
            "Write in capital letters only.",
            "Your entire answer should be in all capital letters.",
            "Use all caps.",
            "Answer in English, with every letter capitalized.",
            "Nothing but uppercase letters.",
        ],
        [""],
        lambda text, _: text.isupper(),
        lambda text, _: without(len(re.findall(r"\b\w*[a-z]", text))) * any(map(str.isupper, text)),
    ),
    "quotation": Constraint(
        [
            "Put your whole answer in double quotation marks.",
            "Wrap the entire reply with double quotes.",
            "Start and end your answer with a double quotation mark.",
            "Enclose everything you say in double quotes.",
        ],
        [""],
        lambda text, _: bool(quoted.fullmatch(text)),
        lambda text, _: text.strip().startswith('"') / 2 + bool(quoted.fullmatch(text)) / 2,
    ),
    "title": Constraint(
        [
            "Give it a title in double angular brackets, such as <<a good day>>.",
            "Your answer must have a title, wrapped like <<this>>.",
            "It needs a title in double angle brackets, i.e. <<the title>>.",
            "Put a title into << and >>.",
        ],
        [""],
        lambda text, _: bool(title.search(text)),
        lambda text, _: ("<<" in text) / 2 + bool(title.search(text)) / 2,
    ),
    "postscript": Constraint(
        [
            "At the end, add a postscript that starts with {}",
            "Finish with a postscript beginning with {}",
            "Please close with a postscript; it should start with {}",
            "Add a last note that begins with {}",
        ],
        ["P.S.", "P.P.S"],
        has_postscript,
        has_postscript,
    ),
    "placeholders": Constraint(
        [
            "Use at least {} placeholders in square brackets, such as [name].",
            "The answer must contain at least {} placeholders like [address].",
            "Include {} or more placeholders in square brackets, e.g. [date].",
            "Leave at least {} blanks for me to fill in, written like [place].",
        ],
        ["1", "2", "3", "4"],
        lambda text, value: blanks(text) >= int(value),
        lambda text, value: share_of(blanks(text), value),
    ),
    "bullets": Constraint(
        [
            "Answer with exactly {} bullet points. Use markdown bullets such as: * This is a "
            "point.",
            "Your reply must be a list of exactly {} bullet points, in markdown (* point).",
            "There should be exactly {} bullets, like: * one point",
            "Put it into {} bullet points, each on a line that begins with *",
        ],
        ["2", "3", "4"],
        lambda text, value: bullets(text) == int(value),
        lambda text, value: nearness(bullets(text), value),
    ),
    "highlights": Constraint(
        [
            "Highlight at least {} parts of your answer with markdown, such as *this part*.",
            "Mark at least {} sections with asterisks, i.e. *highlighted text*.",
            "At least {} phrases should be highlighted in markdown, like *this*.",
            "Emphasize {} or more phrases with markdown asterisks.",
        ],
        ["1", "2", "3"],
        lambda text, value: highlights(text) >= int(value),
        lambda text, value: share_of(highlights(text), value),
    ),
    "sections": Constraint(
        [
            "Your answer must have {} sections. Mark the beginning of each with SECTION X, such "
            "as: SECTION 1",
            "Split it into {} sections that begin with SECTION and a number, such as SECTION 2.",
            "Divide your reply into {} parts that are labeled SECTION 1 and so on.",
        ],
        ["2", "3"],
        lambda text, value: sections(text) >= int(value),
        lambda text, value: share_of(sections(text), value),
    ),
    "JSON": Constraint(
        [
            "The entire output must be JSON.",
            "Format your whole answer as JSON; markdown ticks are fine.",
            "Answer only with a JSON object.",
            "Wrap everything in JSON.",
        ],
        [""],
        lambda text, _: is_json(text),
        lambda text, _: bool(re.match(r"\s*(```(json)?\s*)?\{", text)) / 2 + is_json(text) / 2,
    ),
    "ending": Constraint(
        [
            'Finish with exactly this phrase: "{}" Nothing may follow it.',
            'The very last words must be "{}"',
            "End your answer with the exact phrase {} and no other words after it.",
            'Close with these words and nothing else: "{}"',
        ],
        ENDINGS.split("|"),
        lambda text, value: ended(text).endswith(value.lower()),
        shared_end,
    ),
    "keyword": Constraint(
        [
            'Include the word "{}".',
            "Use the keyword {} in your answer.",
            "The word {} must appear.",
            'Make sure that you mention "{}".',
            "Your text should contain {}.",
        ],
        WORDS,
        lambda text, value: value in text.lower(),
        lambda text, value: value in text.lower(),
    ),
    "repeated keyword": Constraint(
        [
            'The word "{}" should appear at least 2 times.',
            "Use the word {} at least twice.",
            "In your answer, {} should occur 2 times or more.",
            "Say {} two or more times.",
        ],
        WORDS,
        lambda text, value: text.lower().count(value) >= 2,
        lambda text, value: share_of(text.lower().count(value), "2"),
    ),
    "forbidden": Constraint(
        [
            'Do not use the word "{}".',
            "The word {} is not allowed in your answer.",
            "Avoid the keyword {}.",
            'Never say "{}".',
        ],
        [*WORDS, "the", "very", "good", "and", "is"],
        lambda text, value: not re.search(rf"\b{value}\b", text.lower()),
        lambda text, value: without(len(re.findall(rf"\b{value}\b", text.lower()))),
    ),
    "letter": Constraint(
        [
            "The letter {} should appear at least 6 times.",
            "Let the letter {} appear 6 times or more.",
            "Use the letter {} six times or more often.",
        ],
        list("abdfgkpuvw"),
        lambda text, value: text.lower().count(value) >= 6,
        lambda text, value: share_of(text.lower().count(value), "6"),
    ),
    "few words": Constraint(
        [
            "Use fewer than {} words.",
            "Answer with less than {} words.",
            "Keep it under {} words.",
            "Limit yourself to fewer than {} words.",
        ],
        ["15", "25", "40"],
        lambda text, value: 0 < words(text) < int(value),
        lambda text, value: below(words(text), value),
    ),
    "many words": Constraint(
        [
            "Use at least {} words.",
            "Your answer should contain {} words or more.",
            "Write {} or more words.",
            "It should have at least {} words.",
        ],
        ["30", "40", "50"],
        lambda text, value: words(text) >= int(value),
        lambda text, value: share_of(words(text), value),
    ),
    "few sentences": Constraint(
        [
            "Answer in less than {} sentences.",
            "Your reply must have fewer than {} sentences.",
            "Use fewer than {} sentences.",
            "Keep it below {} sentences.",
        ],
        ["2", "3", "4"],
        lambda text, value: 0 < sentences(text) < int(value),
        lambda text, value: below(sentences(text), value),
    ),
    "many sentences": Constraint(
        [
            "Answer with at least {} sentences.",
            "Your reply must have {} or more sentences.",
            "Use {} sentences or more.",
            "Write no fewer than {} sentences.",
        ],
        ["3", "4", "5"],
        lambda text, value: sentences(text) >= int(value),
        lambda text, value: share_of(sentences(text), value),
    ),
    "paragraphs": Constraint(
        [
            "Write {} paragraphs, separated by the markdown divider ***",
            "There should be exactly {} paragraphs. Separate them with ***",
            "Use {} paragraphs with *** between them.",
            "Put *** between your {} paragraphs.",
        ],
        ["2", "3"],
        lambda text, value: paragraphs(text, "***") == int(value),
        lambda text, value: nearness(paragraphs(text, "***"), value),
    ),
    "two answers": Constraint(
        [
            "Give two different answers, separated by six asterisks: ******",
            "Write two versions. Separate them with 6 asterisk symbols ******",
            "I want two different responses, with ****** between them.",
            "Two alternatives, please, divided by ******",
        ],
        [""],
        lambda text, _: paragraphs(text, "******") == 2 and text.count("******") == 1,
        lambda text, _: (
            min(text.count("******"), 1) / 2
            + (paragraphs(text, "******") == 2 == text.count("******") + 1) / 2
        ),
    ),
    "capital words": Constraint(
        [
            "Write at least {} words in all capital letters.",
            "Use words in all caps at least {} times.",
            "{} or more words should be in ALL CAPS.",
            "Put at least {} words into capitals.",
        ],
        ["2", "3"],
        lambda text, value: capitals(text) >= int(value),
        lambda text, value: share_of(capitals(text), value),
    ),
    "repeat": Constraint(
        [
            "First repeat the request word for word without change, then answer. The request to "
            "repeat: {}",
            "Before you answer, repeat this sentence exactly: {}",
            "Repeat the following sentence without change, and only then answer it: {}",
            "Copy this request before you give your answer: {}",
        ],
        [task.format(topic) for task in TASKS[:4] for topic in TOPICS[:12]],
        lambda text, value: text.strip().lower().startswith(value.lower()),
        lambda text, value: shared_start(text.strip().lower(), value.lower()) / len(value),
    ),
}
CONTRARY = [  # kinds that one text cannot fulfil together, or only by chance
    *({"JSON", name} for name in CONSTRAINTS if name != "JSON"),
    *({"lowercase", name} for name in ("uppercase", "capital words", "postscript", "sections")),
    {"uppercase", "capital words"},
    {"quotation", "repeat"},
    {"few words", "many words"},
    {"few sentences", "many sentences"},
    {"paragraphs", "two answers"},
    {"forbidden", "keyword"},
    {"forbidden", "repeated keyword"},
]
HELD_OUT_VALUES = {
    "repeat": [task.format(topic) for task in TASKS[4:8] for topic in HELD_OUT_TOPICS[:6]]
}


def requests(number: int, seed: int, held_out: bool = False) -> list[dict]:
    """Prompts of one constraint, or of two in a third of them, with the names and values of what
    they ask for."""
    draw = random.Random(seed)
    rows = []
    kinds = list(CONSTRAINTS)
    for place in range(number):
        names = [kinds[place % len(kinds)]]
        others = [name for name in kinds if {name, names[0]} not in CONTRARY and name != names[0]]
        names += draw.sample(others, k=bool(others) and draw.random() < 1 / 3)
        topic = draw.choice(HELD_OUT_TOPICS if held_out else TOPICS)
        parts = [draw.choice(TASKS).format(topic)]
        values = []
        for name in names:
            constraint = CONSTRAINTS[name]
            *shown, unseen = constraint.wordings
            values.append(
                draw.choice(
                    HELD_OUT_VALUES.get(name, constraint.values) if held_out else constraint.values
                )
            )
            parts.append((unseen if held_out else draw.choice(shown)).format(values[-1]))
        content = [{"role": "user", "content": " ".join(parts)}]
        rows.append({"prompt": content, "names": names, "values": values})
    draw.shuffle(rows)
    return rows


def fulfilled(text: str, names: list[str], values: list[str]) -> list[bool]:
    """Whether a text fulfils each of its constraints."""
    return [CONSTRAINTS[name].check(text, value) for name, value in zip(names, values)]


def fresh(text: str) -> float:
    """Share of a text that is new words, from 0 to 1: one for every 8 characters, and fewer after
    320, as in prose.

    Prose has about 1. Repetition, lists of marks and answers of a word or two have less.
    """
    length = max(len(text), 40)
    new = len(set(re.findall(r"[a-z]{3,}", text.lower())))
    return min(new / min(length / 8, 40 * (length / 320) ** 0.75), 1)


def progress(
    completions: list, names: list[list[str]], values: list[list[str]], **kwargs
) -> list[float]:
    """The reward: how far an answer fulfils its constraints, on average, times how much of it is
    new words."""
    scores = []
    for turns, kinds, asked in zip(completions, names, values):
        text = turns[0]["content"]
        share = sum(
            CONSTRAINTS[kind].progress(text, value) for kind, value in zip(kinds, asked)
        ) / len(kinds)
        scores.append(share * fresh(text))
    return scores
