"""What the tokens of a stream are: patches of an image, frames of a sound, image tokens in a prompt.

Plain records, no framework.  Sizes are (height, width); boxes are half open, in pixels of the model's input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attrace.errors import InputError

Box = tuple[int, int, int, int]
"""(top, left, bottom, right), bottom and right excluded."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The tokens of one image (or clip): prefix tokens, then patches row by row, then what may follow.

    >>> grid = Grid(6, 8, prefix=("class",), patch=(16, 16), stride=(16, 16))
    >>> len(grid), grid.place(20), grid.box(20)
    (49, (0, 2, 3), (32, 48, 48, 64))
    """

    height: int
    """Patches from top to bottom."""
    width: int
    prefix: tuple[str, ...] = ()
    """Names of the tokens before the patches: "class", "distillation", "register 1"."""
    suffix: tuple[str, ...] = ()
    """Names of the tokens after them: "detection 1", "padding"."""
    frames: int = 1
    """Grids in time, one after the other (video)."""
    patch: tuple[int, int] | None = None
    """How far a patch reaches, in pixels; None where it is not known."""
    stride: tuple[int, int] | None = None
    """From one patch to the next, in pixels; smaller than the patch where patches overlap."""
    offset: tuple[int, int] = (0, 0)
    """Where the first patch begins, in pixels; negative where the model pads the image."""
    image: tuple[int, int] | None = None
    """The model's input, in pixels; boxes end there."""
    axes: tuple[str, str] = ("height", "width")
    """("frequency", "time") for a spectrogram."""
    rate: float | None = None
    """Steps of the time axis per second, where an axis is time."""
    start: int = 0
    """Index of the first token in a stream that packs several images into one sequence."""
    order: tuple[int, ...] | None = None
    """For each patch token in turn, its place counted row by row; None: they come row by row."""

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1 or self.frames < 1:
            raise InputError(
                f"Expected a grid of at least one patch. Received: {self.frames} x {self.height} x {self.width}."
            )
        if self.order is not None and sorted(self.order) != list(range(self.patches)):
            raise InputError(
                f"Expected an order that names each of the {self.patches} patches once. Received: {len(self.order)} "
                "entries."
            )

    def __len__(self) -> int:
        """How many tokens the image takes."""
        return len(self.prefix) + self.patches + len(self.suffix)

    @property
    def patches(self) -> int:
        return self.frames * self.height * self.width

    @property
    def first(self) -> int:
        """Index of the first patch token in the stream."""
        return self.start + len(self.prefix)

    @property
    def stop(self) -> int:
        """One past the last token of the image in the stream."""
        return self.start + len(self)

    @property
    def span(self) -> tuple[int, int]:
        """First token and one past the last."""
        return self.start, self.stop

    @property
    def tokens(self) -> tuple[int, ...]:
        """The stream's index of each patch, row by row."""
        if self.order is None:
            return tuple(range(self.first, self.first + self.patches))
        at = sorted(range(self.patches), key=self.order.__getitem__)
        return tuple(self.first + i for i in at)

    def token(self, row: int, column: int, frame: int = 0) -> int:
        """The stream's index of one patch."""
        self._check("row", row, self.height)
        self._check("column", column, self.width)
        self._check("frame", frame, self.frames)
        place = (frame * self.height + row) * self.width + column
        return self.first + (place if self.order is None else self.order.index(place))

    def named(self, name: str) -> int:
        """The stream's index of a prefix or suffix token."""
        names = [*self.prefix, *[None] * self.patches, *self.suffix]
        if name not in self.prefix + self.suffix:
            had = ", ".join(self.prefix + self.suffix) or "none besides the patches"
            raise InputError(f"Expected one of the model's own tokens: {had}. Received: {name!r}.")
        return self.start + names.index(name)

    def place(self, token: int) -> tuple[int, int, int] | None:
        """(frame, row, column) of a token; None for a prefix or suffix token."""
        if not self.start <= token < self.stop:
            raise InputError(
                f"Expected a token from {self.start} to {self.stop - 1}: {len(self.prefix)} before and "
                f"{len(self.suffix)} after {self.frames} x {self.height} x {self.width} patches. Received: {token}."
            )
        at = token - self.first
        if not 0 <= at < self.patches:
            return None
        at = at if self.order is None else self.order[at]
        frame, rest = divmod(at, self.height * self.width)
        return frame, *divmod(rest, self.width)

    def name(self, token: int) -> str:
        """What to call a token: "class", "row 2, column 3"."""
        place = self.place(token)
        if place is not None:
            frame, row, column = place
            where = f"row {row}, column {column}"
            return f"frame {frame}, {where}" if self.frames > 1 else where
        before = token - self.start
        return self.prefix[before] if before < len(self.prefix) else self.suffix[token - self.stop]

    def box(self, token: int) -> Box | None:
        """The pixels that a patch token was made from; None for the other tokens."""
        place = self.place(token)
        if place is None:
            return None
        if self.patch is None or self.stride is None:
            raise InputError(
                "Expected a grid that knows its patch size. Received: one of a model whose patches attrace could not "
                "measure. Set it with dataclasses.replace(grid, patch=..., stride=...)."
            )
        edges = [
            _clipped(offset + at * step, size, end)
            for at, step, size, offset, end in zip(
                place[1:], self.stride, self.patch, self.offset, self.image or (None, None), strict=True
            )
        ]
        return edges[0][0], edges[1][0], edges[0][1], edges[1][1]

    def seconds(self, token: int) -> tuple[float, float] | None:
        """Start and end of a spectrogram's patch in seconds; None for the other tokens."""
        if "time" not in self.axes:
            raise InputError(f"Expected a grid with an axis of time. Received: {self.axes}.")
        box = self.box(token)
        if box is None:
            return None
        axis = self.axes.index("time")
        return _seconds(box[axis], box[axis + 2], self.rate)

    def merged(self, factor: int) -> Grid:
        """The grid after factor x factor patches became one each, row by row; an odd rest makes a patch of its own."""
        height, width = -(-self.height // factor), -(-self.width // factor)
        patch = stride = None
        if self.patch is not None and self.stride is not None:
            (high, wide), (down, right) = self.patch, self.stride
            patch = high + (factor - 1) * down, wide + (factor - 1) * right
            stride = factor * down, factor * right
        return replace(self, height=height, width=width, patch=patch, stride=stride, order=None)

    @staticmethod
    def _check(what: str, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise InputError(f"Expected a {what} from 0 to {count - 1}. Received: {index}.")


@dataclass(frozen=True, slots=True)
class Frames:
    """The tokens of a sound: one per `stride` steps of the model's input, each made from `window` steps.

    >>> frames = Frames(49, stride=320, window=400, length=16000, rate=16000)
    >>> frames.seconds(1)
    (0.02, 0.045)
    """

    count: int
    stride: int
    window: int
    """How many steps of the input a frame was made from (the receptive field of the strided convolutions)."""
    offset: int = 0
    """Where the first frame begins; negative where the model pads."""
    length: int | None = None
    """Steps of the model's input; frames end there."""
    rate: float | None = None
    """Steps per second: samples of a waveform, or columns of a spectrogram."""
    prefix: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prefix) + self.count

    def steps(self, token: int) -> tuple[int, int] | None:
        """First and one past the last step of the input that a token was made from; None for a prefix token."""
        if not 0 <= token < len(self):
            raise InputError(f"Expected a token from 0 to {len(self) - 1}. Received: {token}.")
        at = token - len(self.prefix)
        return None if at < 0 else _clipped(self.offset + at * self.stride, self.window, self.length)

    def seconds(self, token: int) -> tuple[float, float] | None:
        """Start and end in seconds; InputError where the sampling rate is not known."""
        steps = self.steps(token)
        return None if steps is None else _seconds(*steps, self.rate)


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The image tokens of one image inside a language model's prompt."""

    item: int
    """Which prompt of the batch."""
    image: int
    """Which image, counted over the batch."""
    grid: Grid
    """Its tokens in the prompt: grid.first is the first patch's position."""

    @property
    def span(self) -> tuple[int, int]:
        """First position and one past the last."""
        return self.grid.span


def _clipped(start: int, size: int, end: int | None) -> tuple[int, int]:
    stop = start + size if end is None else min(start + size, end)
    return max(0, start), max(0, stop)


def _seconds(start: float, stop: float, rate: float | None) -> tuple[float, float]:
    if not rate:
        raise InputError(
            "Expected a known sampling rate. Received: a model whose configuration names none. Set it: "
            "dataclasses.replace(frames, rate=16000)."
        )
    return start / rate, stop / rate
