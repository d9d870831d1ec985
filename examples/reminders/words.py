"""Word lists and small pieces of English shared by the two generators in this folder.

Knows: names, things, clock times, days, numbers, and how people say them. Does not know: what a
reminder is (`make_task.py`) or what the pretraining documents look like (`make_corpus.py`).
Everything is drawn from one `random.Random` that the caller seeds, so files come out byte-equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


def _listed(text: str) -> list[str]:
    """Comma-separated text as a list; line breaks count as blanks."""
    return [" ".join(item.split()) for item in text.split(",")]


NAMES = _listed(
    """Ana, Ben, Carla, David, Elena, Felix, Grace, Hugo, Ines, Jonas, Karim, Lena, Marco, Nadia,
    Oscar, Paula, Quentin, Rosa, Samir, Tanja, Umar, Vera, Walter, Xenia, Yusuf, Zoe, Alice,
    Bruno, Chloe, Dario, Emma, Farid, Gina, Hanna, Igor, Julia, Kofi, Laura, Mateo, Nina, Omar,
    Petra, Rafael, Sofia, Tom, Ursula, Victor, Wanda, Yara, Adam, Bella, Clara, Diego, Esther,
    Frank, Greta, Henry, Irene, Jack, Katya, Leo, Mila, Noah, Olga, Pedro, Ruth, Simon, Theo, Uma,
    Viktor, Will, Ximena, Yves, Amir, Beatriz, Cyril, Dina, Elias, Fatima, George, Helen, Ivan,
    Jana, Kenji, Lucia, Maria, Nils, Otto, Priya, Rita, Stefan, Tara, Ulrich, Violet, Wei, Yoko,
    Abel, Bianca, Cora, Dmitri"""
)
# People who appear in the held-out reminders and in no training reminder.
HELD_OUT_NAMES = _listed(
    """Arthur, Brenda, Cedric, Delia, Edgar, Flora, Gustav, Hilda, Ismael, Joanna, Konrad, Livia,
    Malik, Norma, Olaf"""
)
RELATIONS = _listed(
    """mom, dad, the dentist, the landlord, the plumber, the bank, the doctor, grandma, the vet, my
    boss, the school, the insurance, my sister, my brother, the neighbours, the office, the
    garage, the team"""
)
THINGS = _listed(
    """apples, bread, milk, eggs, coffee, rice, paint, a lamp, new shoes, a train ticket, stamps,
    flowers, a birthday card, the keys, batteries, a phone charger, dog food, cat litter, olive
    oil, honey, cheese, the blue folder, a winter coat, light bulbs, printer paper, a toothbrush,
    the red suitcase, tea, the library books, sunscreen, a notebook, two pizzas, the parcel, some
    soap, tomatoes, a cake"""
)
TOPICS = _listed(
    """the report, the budget, the trip, the contract, the party, the invoice, the garden, the
    meeting, the new flat, the car, the exam, the project, the wedding, the slides, the keys,
    dinner, the rent, the photos, the visa, the holiday, the roof, the heating"""
)
CHORES = _listed(
    """water the plants, take out the trash, feed the cat, walk the dog, clean the kitchen, pay the
    rent, charge the car, renew my passport, back up the laptop, do the laundry, take my pills,
    wash the car, check the oven, file the taxes, update my resume, cancel the gym, change the bed
    sheets, defrost the freezer, sign the lease, read the contract, stretch, drink some water,
    lock the shed, book a table, order firewood, mow the lawn, turn off the heating, vacuum the
    stairs"""
)
CITIES = _listed(
    """Rome, Oslo, Lima, Cairo, Paris, Delhi, Quito, Tokyo, Lagos, Dublin, Vienna, Prague, Boston,
    Madrid, Lisbon, Athens, Berlin, Warsaw, Nairobi, Toronto, Havana, Seoul, Tunis, Zagreb,
    Geneva"""
)
COLOURS = _listed("""red, blue, green, yellow, black, white, brown, grey, orange, purple, pink""")
ANIMALS = _listed(
    """dog, cat, horse, bird, rabbit, fish, goat, mouse, turtle, duck, hen, sheep, fox, bear,
    frog"""
)
JOBS = _listed(
    """teacher, baker, nurse, driver, painter, farmer, cook, pilot, writer, judge, singer,
    carpenter, engineer, gardener, tailor, doctor"""
)
DAYS = _listed("""Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday""")
MONTHS = _listed(
    """January, February, March, April, May, June, July, August, September, October, November,
    December"""
)
NUMBERS = _listed(
    """zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen,
    fourteen, fifteen, sixteen, seventeen, eighteen, nineteen, twenty"""
)
SYLLABLES = _listed(
    """ba, be, bo, da, de, di, fa, fo, ga, go, ka, ki, ko, la, le, lo, ma, me, mi, mo, na, ne, no,
    pa, po, ra, re, ri, ro, sa, se, si, so, ta, te, ti, to, va, ve, vi, za, zo, lin, mar, ton,
    ber, den, fel, gar, hul"""
)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A time of day: what a person says, and the same on the 24-hour clock."""

    said: str
    hhmm: str


def clock(rng: Random) -> Clock:
    """A time on the hour, half or quarter (sometimes any five minutes), in one of six wordings."""
    hour, minute = (
        rng.randrange(6, 23),
        rng.choice((0, 0, 0, 15, 30, 30, 45, rng.randrange(12) * 5)),
    )
    hhmm = f"{hour:02d}:{minute:02d}"
    if minute == 0 and hour == 12 and rng.random() < 0.6:
        return Clock(said="noon", hhmm=hhmm)
    half_day, twelve = ("am" if hour < 12 else "pm"), (hour - 1) % 12 + 1
    exact = f"{twelve}" if minute == 0 else f"{twelve}:{minute:02d}"
    style = rng.randrange(8)
    if style < 3:
        return Clock(said=f"{exact}{half_day}", hhmm=hhmm)
    if style < 5:
        return Clock(said=f"{exact} {half_day}", hhmm=hhmm)
    if style == 5:
        return Clock(said=hhmm, hhmm=hhmm)
    return Clock(said=f"{_spoken(hour, minute)} {_part_of_day(hour)}", hhmm=hhmm)


def _spoken(hour: int, minute: int) -> str:
    this, following = NUMBERS[(hour - 1) % 12 + 1], NUMBERS[hour % 12 + 1]
    words = {0: f"{this} o'clock", 15: f"quarter past {this}", 30: f"half past {this}"}
    words[45] = f"quarter to {following}"
    twelve = (hour - 1) % 12 + 1
    return words.get(minute, f"{twelve}:{minute:02d}")


def _part_of_day(hour: int) -> str:
    if hour < 12:
        return "in the morning"
    return "in the afternoon" if hour < 18 else "in the evening"


def month_day(rng: Random) -> tuple[str, str]:
    """A calendar day as people write it, and as MM-DD."""
    month, day = rng.randrange(12), rng.randrange(1, 29)
    name = MONTHS[month]
    suffix = "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    said = rng.choice((f"{name} {day}", f"{day} {name}", f"{name} {day}{suffix}"))
    return said, f"{month + 1:02d}-{day:02d}"


def nonsense(rng: Random) -> str:
    """An invented word, so that copying is learned as copying and not word by word."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3))))
