"""The pretraining text of the small base model: writes `corpus.jsonl`, one {"text": ...} a line.

    python examples/reminders/make_corpus.py --documents 120000 --out /tmp/corpus.jsonl

Everything is made up here from word lists, nothing is taken from elsewhere. The text is general:
short stories about people, days and shopping, questions with answers to look up, clocks and
calendars, small JSON documents of many kinds, and copying. It holds no reminder, no "Reminder:"
prompt and none of the reminder schema, so the base model scores about 0 on that task; what it
learns is to read, look up, copy and write JSON. Names of keys and wordings vary on purpose.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import words

Maker = Callable[[Random], str]


def _person(rng: Random) -> str:
    everyone = words.NAMES + words.HELD_OUT_NAMES
    return rng.choice(everyone) if rng.random() < 0.8 else words.nonsense(rng).capitalize()


def _thing(rng: Random) -> str:
    if rng.random() < 0.3:
        return f"the {rng.choice(words.COLOURS)} {words.nonsense(rng)}"
    return rng.choice(words.THINGS)


def _title(rng: Random) -> str:
    """A free span of words, to be copied whole."""
    pools = (words.TOPICS, words.THINGS, words.CHORES, words.CITIES, words.ANIMALS)
    parts = [
        words.nonsense(rng) if rng.random() < 0.4 else rng.choice(rng.choice(pools))
        for _ in range(rng.choice((1, 1, 2, 2, 3)))
    ]
    return rng.choice((" ", " with ", " and ", " for ", " about ", " to ")).join(parts)


def _day(rng: Random) -> str:
    return rng.choice(words.DAYS)


def story(rng: Random) -> str:
    """A few sentences about one or two people."""
    first, second = _person(rng), _person(rng)
    job, city, day = rng.choice(words.JOBS), rng.choice(words.CITIES), _day(rng)
    moment = words.clock(rng).said
    lines = [
        f"{first} is a {job} in {city}.",
        f"On {day} at {moment} {first} met {second}.",
        f"They talked about {rng.choice(words.TOPICS)}.",
        f"{second} bought {_thing(rng)} for {first}.",
        f'"Can you {rng.choice(words.CHORES)}?" asked {second}.',
        f"{first} had to {rng.choice(words.CHORES)} before {_day(rng)}.",
        f"In {rng.randrange(2, 11)} days {first} will see {second} in {rng.choice(words.CITIES)}.",
        f"Every {_day(rng)} {second} goes to {rng.choice(words.CITIES)}.",
        f"Tomorrow {first} wants to call {second}.",
    ]
    middle = rng.sample(lines[1:], rng.randrange(2, 6))
    return " ".join([lines[0], *middle])


def lookup(rng: Random) -> str:
    """Facts, then questions about some of them."""
    people = list({_person(rng) for _ in range(rng.randrange(2, 6))})
    verb, pool = rng.choice(
        (
            ("likes", words.THINGS),
            ("lives in", words.CITIES),
            ("has a", words.ANIMALS),
            ("talks about", words.TOPICS),
            ("works as a", words.JOBS),
            ("comes on", words.DAYS),
        )
    )
    facts = {who: rng.choice(pool) if rng.random() < 0.7 else _title(rng) for who in people}
    text = " ".join(f"{who} {verb} {what}." for who, what in facts.items())
    asked = rng.sample(people, min(len(people), 2))
    return text + "".join(
        f"\nWho {verb} {facts[who]}? {who}\nAnd {who}? {facts[who]}" for who in asked
    )


def repeat(rng: Random) -> str:
    """A span, said again in another setting."""
    span = _title(rng)
    pattern = rng.choice(
        (
            "Repeat: {0}\n{0}",
            'She said "{0}". He wrote "{0}".',
            'Title: {0}\nFile: "{0}"',
            "{0}\n{0}\n{0}",
            "I heard {0}. Yes, {0}.",
            '["{0}", "{0}"]',
            "Copy this: {0} = {0}",
        )
    )
    return pattern.format(span)


def sequence_copy(rng: Random) -> str:
    """Invented words twice in the same order."""
    row = " ".join(words.nonsense(rng) for _ in range(rng.randrange(3, 9)))
    return f"{row}{rng.choice((' / ', ' -> ', chr(10)))}{row}"


def clock(rng: Random) -> str:
    """The same time on two clocks."""
    lines = []
    for _ in range(rng.randrange(1, 4)):
        moment = words.clock(rng)
        pattern = rng.choice(
            (
                "{0} is {1} on the 24-hour clock.",
                'Clock: {0} = "{1}"',
                '{{"said": "{0}", "clock": "{1}"}}',
                "{0} -> {1}",
                "When it is {0}, the station shows {1}.",
            )
        )
        lines.append(pattern.format(moment.said, moment.hhmm))
    return "\n".join(lines)


def calendar(rng: Random) -> str:
    """Days, months and numbers as words and as digits."""
    said, month_day = words.month_day(rng)
    index, count = rng.randrange(7), rng.randrange(21)
    return rng.choice(
        (
            f"After {words.DAYS[index]} comes {words.DAYS[(index + 1) % 7]}.",
            f"{said} is {month_day} in short.",
            f'Calendar: {said} = "{month_day}"',
            f"{words.NUMBERS[count]} is {count}. {words.NUMBERS[count].capitalize()} = {count}",
            f"{words.DAYS[index]} in small letters is {words.DAYS[index].lower()}.",
            f'Lower: {words.DAYS[index]} -> "{words.DAYS[index].lower()}"',
        )
    )


# What one extraction document can mention: key names, and how a sentence mentions the value.
Field = tuple[tuple[str, ...], Callable[[Random], tuple[str, object]]]


def _time_value(rng: Random) -> tuple[str, object]:
    moment = words.clock(rng)
    return f"at {moment.said}", moment.hhmm


def _day_value(rng: Random) -> tuple[str, object]:
    day = _day(rng)
    return rng.choice((f"on {day}", f"this {day}")), day.lower()


def _date_value(rng: Random) -> tuple[str, object]:
    said, month_day = words.month_day(rng)
    return f"on {said}", month_day


def _number_value(rng: Random) -> tuple[str, object]:
    count = rng.randrange(2, 13)
    return f"for {rng.choice((str(count), words.NUMBERS[count]))} people", count


def _plain(prefix: str, draw: Callable[[Random], str]) -> Callable[[Random], tuple[str, object]]:
    def value(rng: Random) -> tuple[str, object]:
        drawn = draw(rng)
        return f"{prefix} {drawn}".strip(), drawn

    return value


FIELDS: tuple[Field, ...] = (
    (("start", "hour", "from", "opens"), _time_value),
    (("day", "weekday"), _day_value),
    (("month_day", "birthday", "on"), _date_value),
    (("people", "seats", "count"), _number_value),
    (("with", "guest", "partner"), _plain("with", _person)),
    (("city", "place", "where"), _plain("in", lambda rng: rng.choice(words.CITIES))),
    (("colour", "paint"), _plain("painted", lambda rng: rng.choice(words.COLOURS))),
    (("gift", "includes"), _plain("together with", _thing)),
    (("subject", "theme"), _plain("about", _title)),
)
LEADS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("event", "title", "name"), ("The {0} starts", "{0} begins", "Our {0} is", "We planned {0}")),
    (("item", "product", "goods"), ("Order {0}", "We sold {0}", "Please deliver {0}", "Ship {0}")),
    (("song", "film", "book"), ("They played {0}", "We saw {0}", "I liked {0}", "He wrote {0}")),
    (
        ("job", "work", "action"),
        ("The robot will {0}", "He has to {0}", "It can {0}", "She must {0}"),
    ),
    (
        ("customer", "owner", "who"),
        ("A letter from {0}", "{0} came", "{0} wrote", "A visit by {0}"),
    ),
)
HEADS = ("Note", "Event", "Text", "Order", "Message", "Entry", "Log", "Record", "Line", "News")


def extract(rng: Random) -> str:
    """A sentence and the JSON document that holds its facts; absent facts are null."""
    lead_keys, lead_patterns = rng.choice(LEADS)
    subject = _person(rng) if lead_keys[0] == "customer" else _title(rng)
    if lead_keys[0] == "job":
        subject = f"{rng.choice(words.CHORES)}" if rng.random() < 0.5 else _title(rng)
    chosen = rng.sample(FIELDS, rng.randrange(1, 4))
    absent = [field for field in chosen if rng.random() < 0.25]
    document: dict[str, object] = {rng.choice(lead_keys): subject}
    mentions: list[str] = []
    for field in chosen:
        keys, draw = field
        said, value = draw(rng)
        document[rng.choice(keys)] = None if field in absent else value
        mentions += [] if field in absent else [said]
    rng.shuffle(mentions)
    sentence = " ".join([rng.choice(lead_patterns).format(subject), *mentions])
    if rng.random() < 0.3 and mentions:
        sentence = " ".join([*mentions, rng.choice(lead_patterns).format(subject)])
    end = rng.choice((".", "", "", "!"))
    return f"{rng.choice(HEADS)}: {sentence}{end}\nJSON: {json.dumps(document)}"


def records(rng: Random) -> str:
    """A JSON list and the same as lines, or the other way round."""
    people = [_person(rng) for _ in range(rng.randrange(2, 4))]
    key, pool = rng.choice((("city", words.CITIES), ("pet", words.ANIMALS), ("job", words.JOBS)))
    rows = [{"name": who, key: rng.choice(pool)} for who in people]
    lines = "\n".join(f"{each['name']}: {each[key]}" for each in rows)
    document = json.dumps(rows)
    return rng.choice((f"{document}\n{lines}", f"{lines}\n{document}"))


def message(rng: Random) -> str:
    """A short letter with a subject line."""
    sender, receiver, topic = _person(rng), _person(rng), rng.choice(words.TOPICS)
    body = rng.choice(
        (
            f"I will be in {rng.choice(words.CITIES)} on {_day(rng)}.",
            f"Could you {rng.choice(words.CHORES)} at {words.clock(rng).said}?",
            f"Thanks for {_thing(rng)}.",
            f"Let us talk about {topic} tomorrow.",
            f"Please bring {_thing(rng)} and {_thing(rng)} next {_day(rng)}.",
        )
    )
    return f"Subject: {topic}\nHi {receiver},\n{body}\nBest,\n{sender}"


MAKERS: tuple[tuple[Maker, int], ...] = (
    (story, 10),
    (lookup, 10),
    (repeat, 12),
    (sequence_copy, 10),
    (clock, 10),
    (calendar, 6),
    (extract, 32),
    (records, 5),
    (message, 5),
)


def documents(count: int, seed: int) -> list[str]:
    """`count` documents, the same for the same seed."""
    rng = Random(seed)
    makers, weights = zip(*MAKERS, strict=True)
    return [maker(rng) for maker in rng.choices(makers, weights, k=count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=120_000)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "corpus.jsonl")
    args = parser.parse_args()

    texts = documents(args.documents, args.seed)
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    args.out.write_text(lines, encoding="utf-8")
    print(f"{args.out}: {len(texts):,} documents, {len(lines):,} bytes")


if __name__ == "__main__":
    main()
