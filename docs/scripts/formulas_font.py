"""docs/assets/formulas.woff: the part of Latin Modern Math that the site's formulas need.

python docs/scripts/formulas_font.py latinmodern-math.otf   (from CTAN's lm-math; needs fonttools)
"""

from __future__ import annotations

import sys
from pathlib import Path

from fontTools import subset

OUT = Path("docs/assets/formulas.woff")
ITALIC = (0x210E, *range(0x1D434, 0x1D468), *range(0x1D6FC, 0x1D716))  # h has a place of its own
LETTERS = (*range(0x20, 0x7F), *range(0x391, 0x3CA), 0x3D1, 0x3D5, 0x3F5, 0x1D53C)
SIGNS = (
    *(0xB1, 0xB7, 0xD7, 0x2016, 0x2026, 0x2032, 0x2190, 0x2192, 0x2202, 0x2207, 0x2208, 0x220F),
    *(0x2211, 0x2212, 0x2218, 0x221A, 0x221E, 0x2223, 0x2225, 0x222B, 0x2248, 0x2260, 0x2264),
    *(0x2265, 0x22C5, 0x22EF, 0xAF, 0x2C9, 0x2DC, 0x203E, 0x302, 0x303, 0x304, 0x305),
)
SPACES = (0xA0, 0x2002, 0x2003, 0x2004, 0x2005, 0x2009, 0x2061, 0x2062, 0x2063)


def main(source: str) -> None:
    options = subset.Options()
    options.layout_features = ["ssty", "kern", "dtls"]
    options.hinting = False
    options.notdef_outline = True
    options.name_IDs = [0, 1, 2, 4, 6, 13, 14]
    font = subset.load_font(source, options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=[*ITALIC, *LETTERS, *SIGNS, *SPACES])
    subsetter.subset(font)
    # Its licence asks that a changed font has another name.
    for record in font["name"].names:
        if record.nameID in (1, 4, 6):
            record.string = "Formulas"
    names = font["CFF "].cff
    names.fontNames[0] = "Formulas"
    names.topDictIndex[0].FullName = names.topDictIndex[0].FamilyName = "Formulas"
    font.flavor = "woff"
    font.save(OUT)


if __name__ == "__main__":
    main(sys.argv[1])
