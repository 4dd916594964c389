"""The words that generated text is made of. All written for this project; no corpus is used."""

from __future__ import annotations

from typing import Final


def _cut(text: str, at: str = " ") -> tuple[str, ...]:
    return tuple(text.split(at))


PLACES: Final = _cut(
    "boathouse barn cellar attic library chapel mill bakery stable tower garage kitchen pantry workshop "
    "greenhouse lighthouse museum school theatre harbour station warehouse cottage castle bridge market "
    "office studio gallery hangar vault shed lodge cabin palace temple clinic factory brewery dairy forge "
    "farm inn tavern court fort pavilion gatehouse windmill orchard nursery arcade bank cinema "
    "depot embassy hostel kennel"
)
NAMES: Final = _cut(
    "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Leo Marta Nils Olga Paul Rosa Simon "
    "Tara Ulf Vera Walter Yara Zeno Alma Bruno Carla Dario Edith Frank Gina Henry Ida Jakob Kurt Lena"
)
COLOURS: Final = _cut("red green blue yellow black white orange purple")
THINGS: Final = _cut(
    "apple lamp chair kite drum boot cup rope nail coin book clock plate spoon brush key hat glove bell "
    "candle mirror basket bottle button ladder hammer pencil ring saw tent"
)
SUBJECTS: Final = _cut(
    "gardener baker sailor teacher farmer painter doctor miller hunter singer tailor clerk guard weaver "
    "potter mason"
)
VERBS: Final = _cut(
    "walks past,looks at,thinks about,writes about,dreams of,talks about,returns to,points at,"
    "turns away from,remembers,avoids,describes",
    ",",
)
OBJECTS: Final = _cut(
    "old wall,quiet river,long road,dark forest,open field,stone path,tall hedge,cold lake,narrow lane,"
    "wooden fence,empty square,steep hill,green meadow,sandy beach,high cliff,small pond",
    ",",
)
TIMES: Final = _cut(
    "in the morning,before noon,after lunch,in the evening,at night,every day,once a week,during the storm,"
    "in early spring,late in autumn,without a word,with a smile",
    ",",
)
REMARKS: Final = _cut(
    "Nobody asks why.,It has been so for years.,The weather stays mild.,Then all is still again.,"
    "A dog barks far away.,The wind turns slowly.,Rain comes and goes.,That is how it goes here.",
    ",",
)
SHAPES: Final = ("circle", "square", "triangle", "cross")
