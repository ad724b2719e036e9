"""One colour a method and one width a figure, the same everywhere in the repository.

The library's own methods stay apart for readers with any kind of colour vision, and so do the
few that the overviews of the benchmark show. Twenty colours cannot all do so: markers and
dashes tell the others apart.
"""

WIDTH = 7.6  # inches: a column of text, so that letters of 8 points can be read there

PALETTE = {
    "STORM+": "#d9480f",
    "STORM+ mean": "#c2a000",
    "Untuned": "#087f5b",
    "simplified STORM+": "#e8308a",
    "simplified STORM+ mean": "#e599b5",
    "STORM": "#7048e8",
    "STORM mean": "#b197fc",
    "SGD": "#495057",
    "SGD momentum": "#212529",
    "Adam": "#1971c2",
    "AdamW": "#4dabf7",
    "AdaGrad": "#8d6e3f",
    "AdaGrad-norm": "#b08968",
    "RMSprop": "#0b7285",
    "Schedule-Free": "#5c940d",
    "Prodigy": "#3bc9db",
    "D-Adaptation": "#a61e4d",
    "DoG": "#2b8a3e",
    "Mechanic": "#5f3dc4",
    "MARS": "#0ca678",
    "SVRG": "#868e96",
    "AdamW cosine": "#1864ab",
    "Schedule-Free warm-up": "#74b816",
    "Prodigy cosine": "#15aabf",
    "Adam++": "#e67700",
    "Adam++ cosine": "#ffc078",
    "NadamW": "#c2185b",
    "SCSG": "#66a80f",
    "SPIDER": "#1098ad",
    "Hybrid SARAH": "#9c36b5",
}


def shade(colour: str, strength: float) -> str:
    """A colour mixed with white: 1 is the colour itself, for a method at several learning rates."""
    parts = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(255 + strength * (part - 255)):02x}" for part in parts)
