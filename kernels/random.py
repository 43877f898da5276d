"""Counter-based random numbers: the same bits in torch and Triton, on CPU and GPU, in a batch of 64
and of 65,536.

A draw is a function of (seed, stream, step, draw number); a stream is an environment. Stream e is
the SplitMix64 generator
    word(e, c) = mix13(key[e] + c * gamma[e]),     c = step * 2**16 + number of the word within the
    step
with mix13 from Stafford's "Better bit mixing" (variant 13) and an odd gamma of its own per stream,
as in Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), section
4. One 64-bit word gives two 32-bit halves, low half first.
Uniforms take 24 bits of a half, fractions 53 of a word; normals come in Box-Muller pairs (Box and
Muller 1958).
"""

import ctypes
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.backend import host_sync_is_free, use_c, use_triton

WORDS_PER_STEP = 1 << 16
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
TWO_PI = 2.0 * math.pi
FEW_NUMBERS, STEPS_AHEAD = 1024, 32


def _mix13_(z: Tensor) -> Tensor:
    """Mix int64 `z` in place. torch shifts int64 arithmetically, so each shift is masked to be
    logical.
    """
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(MULTIPLIER_1)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(MULTIPLIER_2)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def stream_constants(
    seed: int, num_streams: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """(key [N], gamma [N]) int64 of the streams of `seed`; stream e does not depend on how many
    there are.
    """
    index = torch.arange(1, 2 * num_streams + 1, dtype=torch.int64, device=device)
    root = _mix13_(torch.full((1,), seed, dtype=torch.int64, device=device) + GOLDEN)
    mixed = _mix13_(index * GOLDEN + root)
    return mixed[0::2].contiguous(), mixed[1::2] | 1


def random_words_reference(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, num_words: int
) -> Tensor:
    """[N, W] int64: words offset .. offset+W-1 of a step of each stream. key, gamma: [N] int64;
    step: int64, 0-d or [N].
    """
    number = (
        torch.arange(offset, offset + num_words, dtype=torch.int64, device=key.device)
        + step.unsqueeze(-1) * WORDS_PER_STEP
    )
    return _mix13_((gamma.unsqueeze(1) * number).add_(key.unsqueeze(1)))


def random_uniform_reference(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int
) -> Tensor:
    """[N, count] float32 in [0, 1), multiples of 2**-24, from ceil(count / 2) words a stream."""
    halves = random_words_reference(key, gamma, step, offset, (count + 1) // 2).view(torch.int32)
    return halves.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)[:, :count] * 2.0**-24


def random_fraction_reference(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int
) -> Tensor:
    """[N, count] float64 in [0, 1), multiples of 2**-53, from as many words a stream: for places
    among more than 2**24.
    """
    return (
        (random_words_reference(key, gamma, step, offset, count) >> 11).bitwise_and_((1 << 53) - 1)
    ).double() * 2.0**-53


def random_normal_reference(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int
) -> Tensor:
    """[N, count] float32 standard normal; each word gives the pair r cos(t), r sin(t) with r =
    sqrt(-2 ln(u + 2**-24)).
    """
    uniform = random_uniform_reference(key, gamma, step, offset, count + count % 2)
    radius = (uniform[:, 0::2] + 2.0**-24).log_().mul_(-2.0).sqrt_()
    angle = uniform[:, 1::2] * TWO_PI
    return torch.stack((angle.cos().mul_(radius), angle.sin_().mul_(radius)), dim=2).flatten(1)[
        :, :count
    ]


@triton.jit
def splitmix_word(key, gamma, counter):
    """One 64-bit word a lane; all three are int64, the result is uint64. Shared by every kernel
    that draws.
    """
    z = (key + counter * gamma).to(tl.uint64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def word_to_uniforms(word):
    """Two float32 in [0, 1) from the low and the high half of a uint64 word."""
    low = ((word >> 8) & 0xFFFFFF).to(tl.int32).to(tl.float32) * 5.9604644775390625e-8
    high = (word >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-8
    return low, high


@triton.jit
def word_to_fraction(word):
    """A float64 in [0, 1) from the high 53 bits of a uint64 word."""
    return (word >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def uniform_columns(key, gamma, counter, COUNT: tl.constexpr):
    """COUNT blocks of float32 in [0, 1), as `random_uniform_reference` gives them from word
    `counter` of each lane's stream on.
    """
    columns = ()
    for pair in tl.static_range((COUNT + 1) // 2):
        low, high = word_to_uniforms(splitmix_word(key, gamma, counter + pair))
        columns = columns + (low,)
        if 2 * pair + 1 < COUNT:
            columns = columns + (high,)
    return columns


@triton.jit
def normal_columns(key, gamma, counter, COUNT: tl.constexpr):
    """COUNT blocks of standard normal float32, as `random_normal_reference` gives them from word
    `counter` of each lane's stream on.
    """
    columns = ()
    for pair in tl.static_range((COUNT + 1) // 2):
        first, second = word_to_uniforms(splitmix_word(key, gamma, counter + pair))
        radius = tl.sqrt_rn(-2.0 * tl.log(first + 5.9604644775390625e-8))
        angle = second * 6.283185307179586
        columns = columns + (radius * tl.cos(angle),)
        if 2 * pair + 1 < COUNT:
            columns = columns + (radius * tl.sin(angle),)
    return columns


@triton.jit
def random_kernel(
    key_ptr,
    gamma_ptr,
    step_ptr,
    out_ptr,
    offset,
    count,
    total_words,
    words_per_stream,
    NORMAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lane i makes word i % W of stream i // W and writes its two numbers to out [N, count]."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < total_words
    stream = lane // words_per_stream
    word_number = lane % words_per_stream
    counter = tl.load(step_ptr) * 65536 + offset + word_number
    word = splitmix_word(
        tl.load(key_ptr + stream, mask=inside, other=0),
        tl.load(gamma_ptr + stream, mask=inside, other=0),
        counter,
    )
    first, second = word_to_uniforms(word)
    if NORMAL:
        radius = tl.sqrt_rn(-2.0 * tl.log(first + 5.9604644775390625e-8))
        angle = second * 6.283185307179586
        first = radius * tl.cos(angle)
        second = radius * tl.sin(angle)
    column = word_number * 2
    tl.store(out_ptr + stream * count + column, first, mask=inside)
    tl.store(out_ptr + stream * count + column + 1, second, mask=inside & (column + 1 < count))


def _random_triton(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int, normal: bool
) -> Tensor:
    out = torch.empty(key.shape[0], count, dtype=torch.float32, device=key.device)
    words = (count + 1) // 2
    total = key.shape[0] * words
    if total:
        random_kernel[(triton.cdiv(total, 512),)](
            key,
            gamma,
            step,
            out,
            offset,
            count,
            total,
            words,
            NORMAL=normal,
            BLOCK=512,
            num_warps=4,
        )
    return out


def random_uniform_triton(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int
) -> Tensor:
    """`random_uniform_reference` in one launch."""
    return _random_triton(key, gamma, step, offset, count, normal=False)


def random_normal_triton(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int
) -> Tensor:
    """`random_normal_reference` in one launch (bits equal, logarithm and cosine to rounding)."""
    return _random_triton(key, gamma, step, offset, count, normal=True)


def _random_c(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int, normal: bool
) -> Tensor:
    """One pass, where torch makes a dozen; uniform bits are the reference's, logarithm and cosine
    to rounding.
    """
    out = torch.empty(key.shape[0], count, dtype=torch.float32)
    pointers = [
        ctypes.c_void_p(tensor.data_ptr())
        for tensor in (key.contiguous(), gamma.contiguous(), step.contiguous(), out)
    ]
    numbers = [
        ctypes.c_int64(number) for number in (int(step.dim() > 0), offset, *out.shape, normal)
    ]
    c_library.functions().random_numbers(*pointers[:3], *numbers, pointers[3])
    return out


def random_uniform(key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int) -> Tensor:
    """[N, count] float32 in [0, 1); see `random_uniform_reference`."""
    if use_c(key) and not use_triton(key):
        return _random_c(key, gamma, step, offset, count, normal=False)
    return (random_uniform_triton if use_triton(key) else random_uniform_reference)(
        key, gamma, step, offset, count
    )


def random_normal(key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int) -> Tensor:
    """[N, count] float32 standard normal; see `random_normal_reference`."""
    if use_c(key) and not use_triton(key):
        return _random_c(key, gamma, step, offset, count, normal=True)
    return (random_normal_triton if use_triton(key) else random_normal_reference)(
        key, gamma, step, offset, count
    )


class CounterRandom:
    """Random streams, one an environment. `advance()` moves all to the next step by a device
    counter, so a graph replay moves it too.

    Shapes: `uniform(0.0, 1.0, (2,))` is [N, 2], `normal(())` is [N].
    """

    def __init__(self, seed: int, num_streams: int, device: torch.device | str = "cpu") -> None:
        self.num_envs = num_streams
        self.device = torch.device(device)
        self.key, self.gamma = stream_constants(seed, num_streams, device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self.offset = 0
        self._host_step = (
            0 if host_sync_is_free(self.device) and not use_triton(self.key) else None
        )  # where it is a number, it counts
        # drawn for several steps: (kernel, offset, shape): (first step, [N, *shape] of each, words
        # of a step)
        self._ahead: dict[
            tuple[Any, int, tuple[int, ...]], tuple[int, tuple[Tensor, ...], int]
        ] = {}

    @property
    def step(self) -> Tensor:
        """0-d int64 on the device: steps so far."""
        return self._step if self._host_step is None else self._step.fill_(self._host_step)

    def subset(self, index: Tensor) -> "CounterRandom":
        """The streams `index` [M] at the same step: they draw what they would draw in the full
        batch.
        """
        part = object.__new__(CounterRandom)
        part.num_envs, part.device, part._step, part.offset = (
            index.shape[0],
            self.device,
            self.step,
            self.offset,
        )
        part.key, part.gamma = self.key[index], self.gamma[index]
        part._host_step, part._ahead = None, {}
        return part

    def advance(self, really: Tensor | None = None, by: int = 1) -> None:
        """Go to the next step, or `by` steps further; with `really`, a 0-d bool on the device, only
        where it is true.
        """
        self.offset = 0
        if really is None and self._host_step is not None:
            self._host_step += by
            return
        step = self.step
        step += by if really is None else really
        if self._host_step is not None:
            self._host_step = int(step) if host_sync_is_free(self.device) else None
            # the step may be drawn again, and what was drawn may be overwritten
            self._ahead.clear()

    def uniform(
        self, low: float | Tensor = 0.0, high: float | Tensor = 1.0, shape: tuple[int, ...] = ()
    ) -> Tensor:
        """[N, *shape] float32 uniform in [low, high)."""
        numbers = self._draw(random_uniform, shape)
        if isinstance(low, float | int) and isinstance(high, float | int):
            scale = high - low
            numbers = numbers if scale == 1.0 else numbers.mul_(scale)
            return numbers if low == 0.0 else numbers.add_(low)
        return numbers * (high - low) + low

    def normal(self, shape: tuple[int, ...] = ()) -> Tensor:
        """[N, *shape] float32 standard normal."""
        return self._draw(random_normal, shape)

    def integers(self, low: int, high: int, shape: tuple[int, ...] = ()) -> Tensor:
        """[N, *shape] int64 in [low, high); at most 2**24 values."""
        if not 0 < high - low <= 1 << 24:
            raise ValueError(f"integers({low}, {high}): needs 1 to 2**24 values, got {high - low}")
        return (
            self._draw(random_uniform, shape)
            .mul_(high - low)
            .to(torch.int64)
            .clamp_(max=high - low - 1)
            .add_(low)
        )

    def take_words(self, count: int) -> int:
        """Number of the word of each stream with which `count` uniforms or normals begin that a
        kernel draws itself; the next draw comes after them.
        """
        step = int(self._step) if self._host_step is None else self._host_step
        number = step * WORDS_PER_STEP + self.offset
        self.offset += (count + 1) // 2
        return number

    def disable_compile(self) -> None:
        """What draws is called as it is from functions that torch compiles: it keeps numbers for
        later and calls kernels of its own.
        """
        self._draw = torch.compiler.disable(self._draw)  # type: ignore[method-assign]

    def _draw(self, kernel: Any, shape: tuple[int, ...]) -> Tensor:
        step = self._host_step if host_sync_is_free(self.device) else None
        if step is not None:
            first, blocks, words = self._ahead.get((kernel, self.offset, shape), (0, (), 0))
            if 0 <= step - first < len(blocks):
                self.offset += words
                return blocks[step - first]  # the caller may overwrite it: no number is drawn twice
        count = math.prod(shape)
        if step is not None and 0 < self.num_envs * count <= FEW_NUMBERS:
            numbers = self._draw_ahead(kernel, shape, step)
        else:
            numbers = kernel(self.key, self.gamma, self.step, self.offset, count).reshape(
                self.num_envs, *shape
            )
        self.offset += (count + 1) // 2
        return numbers

    def _draw_ahead(self, kernel: Any, shape: tuple[int, ...], step: int) -> Tensor:
        """[N, *shape], and the same of the next steps: thirty calls cost a CPU more than a thousand
        numbers.
        """
        count = math.prod(shape)
        with torch.inference_mode(False):  # they outlive the mode that is on now
            steps = torch.arange(step, step + STEPS_AHEAD).repeat_interleave(self.num_envs)
            numbers = kernel(
                self.key.repeat(STEPS_AHEAD),
                self.gamma.repeat(STEPS_AHEAD),
                steps,
                self.offset,
                count,
            )
            blocks = numbers.view(STEPS_AHEAD, self.num_envs, *shape).unbind(0)
        self._ahead[kernel, self.offset, shape] = step, blocks, (count + 1) // 2
        return blocks[0]

    def state_dict(self) -> dict[str, Tensor]:
        """The whole state: constants and counter."""
        return {"key": self.key, "gamma": self.gamma, "step": self.step.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict()` of a generator with as many streams."""
        if state["key"].shape != self.key.shape:
            raise ValueError(
                f"random state has {state['key'].shape[0]} streams, this one {self.num_envs}"
            )
        self.key.copy_(state["key"])
        self.gamma.copy_(state["gamma"])
        self._step.copy_(state["step"])
        self.offset = 0
        self._ahead.clear()
        if self._host_step is not None:
            self._host_step = int(self._step)
