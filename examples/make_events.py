"""Make the data of the quickstart: notes about events, each with its one line of JSON.

    python examples/make_events.py

writes ``events.jsonl`` (to train on) and ``events-heldout.jsonl`` (names, places and occasions that training never
sees) beside this file. The same bytes come out on every machine: only ``Random.random`` is used, whose sequence Python
guarantees.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

ROWS, HELD_OUT = 360, 24
INSTRUCTION = "Write this event as one line of JSON."

NAMES = (
    "Anna", "Bashir", "Chiara", "Daniel", "Elif", "Farid", "Grace", "Hannah", "Ivan", "Jamila", "Kenji", "Lucia",
    "Marek", "Nadia", "Oscar", "Priya", "Quentin", "Rosa", "Samuel", "Tomoko", "Uwe", "Valentina", "Wei", "Ximena",
    "Yusuf", "Zofia", "Aunt Clara", "Uncle Ben", "Dr. Novak", "Mrs. Okafor", "Mr. Lindqvist", "the Garcia family",
    "Leo and Mia", "Paul and Ingrid",
)  # fmt: skip
OCCASIONS = (
    "dentist appointment", "piano lesson", "job interview", "board meeting", "yoga class", "book club",
    "birthday party", "car inspection", "guitar concert", "swimming lesson",
    "parents' evening", "wine tasting", "chess tournament",
    "housewarming", "driving test", "team lunch", "eye exam", "pottery workshop", "school play", "rent viewing",
    "marathon training", "garden tour", "film night", "budget review", "haircut", "choir rehearsal", "flea market",
    "vet visit", "city walk", "language exchange", "photo shoot", "science fair",
)  # fmt: skip
PLACES = (
    "the town hall", "Café Luna", "room 204", "the old harbour", "Maple Street 12", "the public library", "Studio 9",
    "the north gate", "Riverside Park", "the Blue Door", "Central Station", "the school gym", "Hotel Astoria",
    "the botanical garden", "Oak Hall", "the corner bakery", "Pier 7", "the community centre", "Elm Square",
    "the second floor kitchen", "Saint Mary's Church", "the sports club", "Dragon Palace", "the art museum",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
HELD_OUT_NAMES = ("Beatrix", "Noah", "Sanjay", "Freya", "Mr. Tanaka", "Aunt Rosalind", "Theo and June", "Amara")
HELD_OUT_OCCASIONS = (
    "tennis match", "violin lesson", "tax meeting", "pizza evening", "blood test", "dance class", "poetry reading",
    "bike repair",
)  # fmt: skip
HELD_OUT_PLACES = ("the market square", "Harbour Street 5", "room 31", "Café Orion", "the city theatre", "Lake View")

# {a}: the occasion with its article.
WITH_PLACE = (
    "{who} has {a} {when} at {where}.",
    "Don't forget {a} with {who} {when}, we meet at {where}.",
    "{What} for {who}: {when}, {where}.",
    "{When}, {who} will be at {where} for {a}.",
    "Could you remind {who} that there is {a} {when} at {where}?",
    "I just booked {a} at {where} for {who}, {when}.",
    "{who} wrote: the {what} is {when} and it takes place at {where}.",
    "There will be {a} at {where} {when}; {who} is coming.",
    "Please put this in the calendar: {what}, {who}, {when}, at {where}.",
    "Hey, {who} cannot do lunch because of {a} at {where} {when}.",
)
WITHOUT_PLACE = (
    "{who} has {a} {when}.",
    "{When}: {what} with {who}. No idea yet where.",
    "The {what} of {who} was moved, it is {when} now.",
    "{who} told me about {a} {when}, place to be announced.",
)


class Picker:
    """Picks by :meth:`random.Random.random` alone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, n: int) -> int:
        return int(self._random.random() * n)

    def of(self, items: Sequence[str]) -> str:
        return items[self.below(len(items))]


def when(pick: Picker) -> str:
    """Return a time as people write it."""
    hour, minute = 7 + pick.below(14), ("00", "15", "30", "45")[pick.below(4)]
    kind = pick.below(4)
    if kind == 0:
        return f"on {pick.of(DAYS)} at {hour}:{minute}"
    if kind == 1:
        return f"on {1 + pick.below(28)} {pick.of(MONTHS)} at {1 + (hour - 1) % 12} {'am' if hour < 12 else 'pm'}"
    if kind == 2:
        return f"next {pick.of(DAYS)} {pick.of(('morning', 'afternoon', 'evening'))}"
    return f"{pick.of(('tomorrow', 'today', 'the day after tomorrow'))} at {hour}:{minute}"


def rows(
    pick: Picker, names: Sequence[str], occasions: Sequence[str], places: Sequence[str], count: int
) -> Iterator[dict[str, str]]:
    """Yield ``count`` different rows."""
    seen: set[str] = set()
    while len(seen) < count:
        who, what, time = pick.of(names), pick.of(occasions), when(pick)
        where = None if pick.below(5) == 0 else pick.of(places)
        template = pick.of(WITHOUT_PLACE if where is None else WITH_PLACE)
        article = "an" if what[0] in "aeiou" else "a"
        note = template.format(
            who=who, what=what, What=what.capitalize(), a=f"{article} {what}", when=time,
            When=time[0].upper() + time[1:], where=where,
        )  # fmt: skip
        note = note[0].upper() + note[1:]
        if note in seen:
            continue
        seen.add(note)
        event = {"who": who, "what": what, "when": time.removeprefix("on "), "where": where}
        answer = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        yield {"instruction": INSTRUCTION, "input": note, "output": answer}


def main(folder: Path) -> None:
    """Write both files into ``folder``."""
    train = rows(Picker(1), NAMES, OCCASIONS, PLACES, ROWS)
    held_out = rows(Picker(2), HELD_OUT_NAMES, HELD_OUT_OCCASIONS, HELD_OUT_PLACES, HELD_OUT)
    for name, source in (("events.jsonl", train), ("events-heldout.jsonl", held_out)):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in source]
        (folder / name).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).parent)
