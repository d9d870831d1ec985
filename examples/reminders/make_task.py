"""Reminders in plain English -> JSON: writes `train.jsonl` and `test.jsonl` beside this file.

    python examples/reminders/make_task.py

One row is {"prompt": "Reminder: ...\nJSON:", "completion": " {...}"}. The answer has four fields:

    task    what to do, in the user's own words
    date    "today", "tomorrow", "friday", "next friday", "in 3 days", "05-14", or null
    time    24-hour HH:MM, or null
    repeat  "daily", "weekly", "monthly", "weekdays", or null

Days stay symbolic on purpose: the program that sets the reminder knows today's date, the model
does not. Held out from training, and in the test rows only: the people in HELD_OUT_NAMES, the
openings in HELD_OUT_OPENINGS, and every exact combination of task, date and time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

import words

# "{task}" is a bare infinitive; "{when}" holds day and time in either order.
OPENINGS = (
    "remind me to {task} {when}",
    "Remind me to {task} {when}",
    "Remind me {when} to {task}",
    "remind me {when} to {task}",
    "please remind me to {task} {when}",
    "Can you remind me to {task} {when}?",
    "Could you remind me {when} to {task}?",
    "I need to {task} {when}",
    "I have to {task} {when}, remind me",
    "Don't let me forget to {task} {when}",
    "set a reminder to {task} {when}",
    "Set a reminder {when} to {task}",
    "{when} I must {task}",
    "note to self: {task} {when}",
    "{task} {when}",
    "{task} {when} please",
)
HELD_OUT_OPENINGS = (
    "Please set a reminder {when} to {task}",
    "I must {task} {when}, don't let me forget",
    "Can you remind me {when} to {task}?",
    "Could you please remind me to {task} {when}?",
)


@dataclass(frozen=True, kw_only=True)
class When:
    """The words for a day, time or repetition, and the three fields they stand for."""

    said: str
    date: str | None
    time: str | None
    repeat: str | None


def task(rng: Random, names: list[str]) -> str:
    """Something to do: a verb with people, things and topics from the lists."""
    person = rng.choice(names) if rng.random() < 0.75 else rng.choice(words.RELATIONS)
    thing, topic = rng.choice(words.THINGS), rng.choice(words.TOPICS)
    forms = (
        f"call {person}",
        f"call {person} about {topic}",
        f"email {person} about {topic}",
        f"text {person}",
        f"meet {person}",
        f"buy {thing}",
        f"buy {thing} for {person}",
        f"pick up {thing}",
        f"bring {thing} to {person}",
        f"send {person} {topic}",
        f"ask {person} about {topic}",
        f"talk to {person} about {topic}",
        f"visit {person}",
        f"return {thing}",
        f"work on {topic}",
        f"thank {person} for {thing}",
    )
    return rng.choice(words.CHORES) if rng.random() < 0.25 else rng.choice(forms)


def when(rng: Random) -> When:
    """A day, a time, both in either order, or a repetition."""
    if rng.random() < 0.2:
        return _repeated(rng)
    day_said, date = _day(rng)
    shape = rng.random()
    if shape < 0.2:
        return When(said=day_said, date=date, time=None, repeat=None)
    moment = words.clock(rng)
    if shape < 0.35:
        return When(said=f"at {moment.said}", date=None, time=moment.hhmm, repeat=None)
    pair = (day_said, f"at {moment.said}")
    said = " ".join(pair if rng.random() < 0.7 else pair[::-1])
    return When(said=said, date=date, time=moment.hhmm, repeat=None)


def _day(rng: Random) -> tuple[str, str]:
    weekday = rng.choice(words.DAYS)
    count = rng.randrange(2, 11)
    said = rng.choice((str(count), words.NUMBERS[count]))
    choices = (
        ("today", "today"),
        ("tomorrow", "tomorrow"),
        ("tomorrow", "tomorrow"),
        (f"on {weekday}", weekday.lower()),
        (f"this {weekday}", weekday.lower()),
        (f"next {weekday}", f"next {weekday.lower()}"),
        (f"in {said} days", f"in {count} days"),
    )
    if rng.random() < 0.2:
        month_said, date = words.month_day(rng)
        return f"on {month_said}", date
    return rng.choice(choices)


def _repeated(rng: Random) -> When:
    moment = words.clock(rng)
    at, time = (f" at {moment.said}", moment.hhmm) if rng.random() < 0.75 else ("", None)
    weekday = rng.choice(words.DAYS)
    said, date, repeat = rng.choice(
        (
            ("every day", None, "daily"),
            (f"every {weekday}", weekday.lower(), "weekly"),
            (f"every {weekday}", weekday.lower(), "weekly"),
            ("every month", None, "monthly"),
            ("on weekdays", None, "weekdays"),
            ("every weekday", None, "weekdays"),
        )
    )
    return When(said=f"{said}{at}", date=date, time=time, repeat=repeat)


def row(rng: Random, openings: tuple[str, ...], names: list[str]) -> dict[str, str]:
    """One training or test row."""
    todo, moment, opening = task(rng, names), when(rng), rng.choice(openings)
    sentence = opening.format(task=todo, when=moment.said)
    if opening.startswith("{when}"):
        sentence = sentence[0].upper() + sentence[1:]
    fields = {"task": todo, "date": moment.date, "time": moment.time, "repeat": moment.repeat}
    return {"prompt": f"Reminder: {sentence}\nJSON:", "completion": " " + json.dumps(fields)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--train-rows", type=int, default=1600)
    parser.add_argument("--test-rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()

    rng = Random(args.seed)
    train = [row(rng, OPENINGS, words.NAMES) for _ in range(args.train_rows)]
    seen = {each["completion"] for each in train}
    test: list[dict[str, str]] = []
    while len(test) < args.test_rows:
        # Half the test rows use an opening, the other half a person, that training never shows.
        new_opening = len(test) % 2 == 0
        openings = HELD_OUT_OPENINGS if new_opening else OPENINGS
        names = words.NAMES if new_opening else words.HELD_OUT_NAMES
        candidate = row(rng, openings, names)
        has_new = new_opening or any(name in candidate["prompt"] for name in names)
        if has_new and candidate["completion"] not in seen:
            seen.add(candidate["completion"])
            test.append(candidate)
    for name, rows in (("train", train), ("test", test)):
        lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in rows)
        (args.folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{args.folder / name}.jsonl: {len(rows)} rows, {len(lines):,} bytes")


if __name__ == "__main__":
    main()
