"""Counter-based random numbers: the same bits in torch and Triton, on CPU and GPU, in a batch of 64
and of 65,536.

A draw is a function of (seed, stream, step, draw number); a stream is an environment. Stream e is
the SplitMix64 generator
    word(e, c) = mix13(key[e] + c * gamma[e]),     c = step * 2**16 + index of the word in the step
with mix13 from Stafford's "Better bit mixing" (variant 13) and an odd gamma for each stream, as in
Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), section 4.
One 64-bit word has two 32-bit halves, low half first. Uniforms take 24 bits of a half, fractions 53
bits of a word; normals come in Box-Muller pairs (Box and Muller 1958).
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, ParamSpec, SupportsIndex

import torch
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.backend import (
    ForMembers,
    choose_kernel,
    host_sync_is_free,
    member_strides,
    use_triton,
    use_triton_for_members,
)
from gpurl.kernels.optional_triton import tl, triton

WORDS_PER_STEP = 1 << 16
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
TWO_PI = 2.0 * math.pi
# on a CPU a draw of at most FEW_NUMBERS also draws those of the next steps
FEW_NUMBERS, STEPS_AHEAD = 1024, 32

Draw = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]  # random_uniform or random_normal
Parameters = ParamSpec("Parameters")
# what other libraries call the draws
OTHER_NAMES = {
    **dict.fromkeys(("random", "rand", "random_sample", "bernoulli", "choice"), "uniform()"),
    **dict.fromkeys(("randn", "standard_normal", "gauss", "normal_"), "normal()"),
    **dict.fromkeys(("randint", "random_integers", "randrange"), "integers(low, high)"),
}


class RandomStreams(NamedTuple):
    """The random streams of N environments at one step."""

    key: Tensor  # [N] int64
    gamma: Tensor  # [N] int64, odd
    step: Tensor  # 0-d int64


def _mix13_(z: Tensor) -> Tensor:
    """Mix int64 `z` in place. torch shifts int64 arithmetically, so each shift is masked to be
    logical.
    """
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(MULTIPLIER_1)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(MULTIPLIER_2)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def stream_constants(
    seed: int, num_streams: int, device: torch.device | str = "cpu", first: int = 0
) -> tuple[Tensor, Tensor]:
    """(key [N], gamma [N]) int64 of the streams first, first + 1, ... of `seed`; stream e does not
    depend on the number of streams.
    """
    end = first + num_streams
    index = torch.arange(2 * first + 1, 2 * end + 1, dtype=torch.int64, device=device)
    root = _mix13_(torch.full((1,), seed, dtype=torch.int64, device=device) + GOLDEN)
    mixed = _mix13_(index * GOLDEN + root)
    return mixed[0::2].contiguous(), mixed[1::2] | 1


def random_words_reference(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, num_words: int
) -> Tensor:
    """[N, W] int64: words offset .. offset+W-1 of a step of each stream. key, gamma: [N] int64;
    step: int64, 0-d or [N].
    """
    word = torch.arange(offset, offset + num_words, dtype=torch.int64, device=key.device)
    counter = word + step.unsqueeze(-1) * WORDS_PER_STEP
    return _mix13_((gamma.unsqueeze(1) * counter).add_(key.unsqueeze(1)))


def random_uniform_reference(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int
) -> Tensor:
    """[N, count] float32 in [0, 1), multiples of 2**-24, from ceil(count / 2) words of a stream."""
    # 24 bits of each half are exact in float32
    halves = random_words_reference(key, gamma, step, offset, (count + 1) // 2).view(torch.int32)
    return halves.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)[:, :count] * 2.0**-24


def random_fraction_reference(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int
) -> Tensor:
    """[N, count] float64 in [0, 1), multiples of 2**-53, from `count` words of a stream: to choose
    among more than 2**24 entries.
    """
    bits = random_words_reference(key, gamma, step, offset, count) >> 11
    return bits.bitwise_and_((1 << 53) - 1).double() * 2.0**-53


def random_normal_reference(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int
) -> Tensor:
    """[N, count] float32 standard normal. Each word gives the pair r cos(t), r sin(t) with
    r = sqrt(-2 ln(u + 2**-24)).
    """
    uniform = random_uniform_reference(key, gamma, step, offset, count + count % 2)
    # Box-Muller; 2**-24 keeps the logarithm finite
    radius = (uniform[:, 0::2] + 2.0**-24).log_().mul_(-2.0).sqrt_()
    angle = uniform[:, 1::2] * TWO_PI
    pairs = torch.stack((angle.cos().mul_(radius), angle.sin_().mul_(radius)), dim=2)
    return pairs.flatten(1)[:, :count]


@triton.jit
def splitmix_word(key, gamma, counter):
    """One 64-bit word for each lane: uint64 from int64 key, gamma and counter. Shared by every
    kernel that draws.
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
def word_to_normals(word):
    """Two standard normal float32 from a uint64 word."""
    first, second = word_to_uniforms(word)
    radius = tl.sqrt_rn(-2.0 * tl.log(first + 5.9604644775390625e-8))
    angle = second * 6.283185307179586
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def word_to_fraction(word):
    """A float64 in [0, 1) from the high 53 bits of a uint64 word."""
    return (word >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def uniform_columns(key, gamma, counter, COUNT: tl.constexpr):
    """COUNT blocks of float32 in [0, 1), those of `random_uniform_reference` from word `counter` of
    each lane's stream on.
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
    """COUNT blocks of standard normal float32, those of `random_normal_reference` from word
    `counter` of each lane's stream on.
    """
    columns = ()
    for pair in tl.static_range((COUNT + 1) // 2):
        first, second = word_to_normals(splitmix_word(key, gamma, counter + pair))
        columns = columns + (first,)
        if 2 * pair + 1 < COUNT:
            columns = columns + (second,)
    return columns


@triton.jit(do_not_specialize=["key_stride", "gamma_stride", "step_stride"])
def random_kernel(
    key_ptr, gamma_ptr, step_ptr, out_ptr, offset, count, total_words, words_per_stream,
    num_streams, key_stride, gamma_stride, step_stride,
    NORMAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lane i makes word i % W of stream i // W and writes its two numbers to out [N, count].
    Strides are from member to member.
    """
    member = tl.program_id(1).to(tl.int64)
    key_ptr += member * key_stride
    gamma_ptr += member * gamma_stride
    step_ptr += member * step_stride
    out_ptr += member * num_streams * count
    # the word of this lane
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
    if NORMAL:
        first, second = word_to_normals(word)
    else:
        first, second = word_to_uniforms(word)
    # of an odd count, the second number of the last word is dropped
    column = word_number * 2
    tl.store(out_ptr + stream * count + column, first, mask=inside)
    tl.store(out_ptr + stream * count + column + 1, second, mask=inside & (column + 1 < count))


def _random_triton(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int, normal: bool
) -> Tensor:
    """The references in one launch: bits equal, logarithm and cosine to rounding. Also of M
    members, each tensor with a leading axis [M, ...], of any stride there.
    """
    members, num_streams = key.shape[:-1], key.shape[-1]
    out = torch.empty((*key.shape, count), dtype=torch.float32, device=key.device)
    words = (count + 1) // 2
    total = num_streams * words
    if total:
        strides = member_strides((key, gamma, step), bool(members))
        random_kernel[(triton.cdiv(total, 512), members.numel())](
            key, gamma, step, out, offset, count, total, words, num_streams, *strides,
            NORMAL=normal, BLOCK=512, num_warps=4,
        )  # fmt: skip
    return out


class DrawOfMembers(ForMembers):
    """`_random_triton`, its arguments by position."""

    forward = staticmethod(_random_triton)


def _random_c(
    key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int, normal: bool
) -> Tensor:
    """The references in one pass, where torch makes a dozen: bits equal, logarithm and cosine to
    rounding.
    """
    key, gamma, step = key.contiguous(), gamma.contiguous(), step.contiguous()
    out = torch.empty(key.shape[0], count, dtype=torch.float32)
    c_library.functions().random_numbers(
        *c_library.pointers(key, gamma, step),
        *c_library.integers(step.numel() > 1, offset, *out.shape, normal),
        *c_library.pointers(out),
    )
    return out


random_uniform_triton = functools.partial(_random_triton, normal=False)
random_normal_triton = functools.partial(_random_triton, normal=True)
random_uniform_c = functools.partial(_random_c, normal=False)
random_normal_c = functools.partial(_random_c, normal=True)


def random_uniform(key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int) -> Tensor:
    """[N, count] float32 in [0, 1); see `random_uniform_reference`."""
    if use_triton_for_members(key):
        return DrawOfMembers.apply(key, gamma, step, offset, count, False)  # type: ignore[no-untyped-call]
    function: Draw = choose_kernel(
        key,
        triton=random_uniform_triton,
        c=random_uniform_c,
        reference=random_uniform_reference,
    )
    return function(key, gamma, step, offset, count)


def random_normal(key: Tensor, gamma: Tensor, step: Tensor, offset: int, count: int) -> Tensor:
    """[N, count] float32 standard normal; see `random_normal_reference`."""
    if use_triton_for_members(key):
        return DrawOfMembers.apply(key, gamma, step, offset, count, True)  # type: ignore[no-untyped-call]
    function: Draw = choose_kernel(
        key, triton=random_normal_triton, c=random_normal_c, reference=random_normal_reference
    )
    return function(key, gamma, step, offset, count)


def names_its_signature(draw: Callable[Parameters, Tensor]) -> Callable[Parameters, Tensor]:
    """`draw`, a method of `CounterRandom`, with a TypeError that says what its arguments are."""

    @functools.wraps(draw)
    def call(*arguments: Parameters.args, **named: Parameters.kwargs) -> Tensor:
        try:
            return draw(*arguments, **named)
        except TypeError as error:
            text = str(error).removeprefix(f"{draw.__qualname__}() ")
            raise TypeError(f"rng.{signature_of(draw)}: {text}") from error

    return call


def signature_of(draw: Callable[..., Tensor]) -> str:
    """`normal(shape=())` for a method of `CounterRandom`."""
    parameters = [*inspect.signature(draw).parameters.values()][1:]
    return f"{draw.__name__}({', '.join(map(_without_annotation, parameters))})"


def _without_annotation(parameter: inspect.Parameter) -> str:
    has_default = parameter.default is not parameter.empty
    return f"{parameter.name}={parameter.default}" if has_default else parameter.name


def _outline(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


class CounterRandom:
    """Random streams of N environments. `advance()` moves all to the next step by a device counter,
    so the replay of a CUDA graph moves it too.

    `shape` is that of one environment: `uniform(0.0, 1.0, (2,))` is [N, 2], `normal()` is [N].
    """

    def __init__(
        self, seed: int, num_streams: int, device: torch.device | str = "cpu", first: int = 0
    ) -> None:
        """first: the number of the first stream, of a part of a larger batch."""
        self.seed = seed
        self.num_envs = num_streams
        self.device = torch.device(device)
        self.key, self.gamma = stream_constants(seed, num_streams, device, first)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self.offset = 0
        # the step is counted here where the host may know it, else in `_step`
        self._host_step = 0 if host_sync_is_free(self.device) and not use_triton(self.key) else None
        # drawn ahead: (kernel, offset, shape) -> (first step, [N, *shape] of each step)
        self._ahead: dict[tuple[Draw, int, tuple[int, ...]], tuple[int, tuple[Tensor, ...]]] = {}

    @property
    def step(self) -> Tensor:
        """0-d int64 on the device: steps so far."""
        return self._step if self._host_step is None else self._step.fill_(self._host_step)

    @property
    def streams(self) -> RandomStreams:
        """The streams at this step, as kernels take them."""
        return RandomStreams(self.key, self.gamma, self.step)

    def count_on_device(self) -> None:
        """From now on the step is a number on the device only, as on a GPU."""
        self._step = self.step
        self._host_step = None
        self._ahead.clear()

    def begin_at(self, first: int) -> None:
        """Become the streams first, first + 1, ... of the seed, in place."""
        key, gamma = stream_constants(self.seed, self.num_envs, self.device, first)
        self.key.copy_(key)
        self.gamma.copy_(gamma)
        self._ahead.clear()

    def restart(self, seeds: Sequence[int], first: int = 0) -> None:
        """Begin anew with an equal share of the streams for each seed, one share after the other:
        share k has the streams first, first + 1, ... of seeds[k]. ValueError if they do not share
        equally.
        """
        share, rest = divmod(self.num_envs, len(seeds))
        if rest:
            raise ValueError(f"{self.num_envs} streams are no equal shares for {len(seeds)} seeds")
        pairs = [stream_constants(seed, share, self.device, first) for seed in seeds]
        key, gamma = (torch.cat(tensors) for tensors in zip(*pairs))
        # loaded in place, as a CUDA graph reads these tensors
        self.load_state_dict({"key": key, "gamma": gamma, "step": torch.zeros_like(self._step)})

    def subset(self, index: Tensor) -> "CounterRandom":
        """The streams `index` [M] at the same step. They draw the numbers that they draw in the
        full batch.
        """
        subset = object.__new__(CounterRandom)
        subset.num_envs = index.shape[0]
        subset.device = self.device
        subset.key = self.key[index]
        subset.gamma = self.gamma[index]
        subset._step = self.step
        subset.offset = self.offset
        subset._host_step = None
        subset._ahead = {}
        return subset

    def advance(self, where: Tensor | None = None, by: int = 1) -> None:
        """Go to the next step, or `by` steps further. With `where`, a 0-d bool on the device, go to
        the next step only if it is true.
        """
        self.offset = 0
        if where is None and self._host_step is not None:
            self._host_step += by
            return
        step = self.step
        step += by if where is None else where
        if self._host_step is not None:
            self._host_step = int(step) if host_sync_is_free(self.device) else None
            # the step may be drawn again, but a caller may have overwritten the numbers
            self._ahead.clear()

    def __getattr__(self, name: str) -> NoReturn:
        """For a name that is missing."""
        if name.startswith("_"):
            raise AttributeError(name)
        kind = type(self)
        draws = [signature_of(draw) for draw in (kind.uniform, kind.normal, kind.integers)]
        hint = f"; its name here is rng.{OTHER_NAMES[name]}" if name in OTHER_NAMES else ""
        raise AttributeError(f"rng has no {name}{hint}. It has {', '.join(draws)}")

    @names_its_signature
    def uniform(
        self, low: float | Tensor = 0.0, high: float | Tensor = 1.0, shape: tuple[int, ...] = ()
    ) -> Tensor:
        """[N, *shape] float32 uniform in [low, high), which may be tensors that broadcast with
        it.
        """
        if isinstance(low, tuple | list) or isinstance(high, tuple | list):
            raise TypeError(f"wanted low and high as numbers or tensors, got {low!r} and {high!r}")
        numbers = self._draw(random_uniform, shape)
        # in place where no limit is a tensor
        if isinstance(low, float | int) and isinstance(high, float | int):
            scale = high - low
            if scale < 0:
                raise TypeError(f"wanted low <= high, got {low} and {high}")
            numbers = numbers if scale == 1.0 else numbers.mul_(scale)
            return numbers if low == 0.0 else numbers.add_(low)
        return numbers * (high - low) + low

    @names_its_signature
    def normal(self, shape: tuple[int, ...] = ()) -> Tensor:
        """[N, *shape] float32 of mean 0 and standard deviation 1."""
        return self._draw(random_normal, shape)

    @names_its_signature
    def integers(self, low: int, high: int, shape: tuple[int, ...] = ()) -> Tensor:
        """[N, *shape] int64 in [low, high); at most 2**24 values."""
        if not (isinstance(low, SupportsIndex) and isinstance(high, SupportsIndex)):
            raise TypeError(
                f"wanted low and high as whole numbers, got {_outline(low)} and {_outline(high)}"
            )
        if not 0 < high - low <= 1 << 24:
            raise ValueError(
                f"rng.integers({low}, {high}): wanted 1 to 2**24 numbers, from low to high - 1, "
                f"got {high - low}"
            )
        return (
            self._draw(random_uniform, shape)
            .mul_(high - low)
            .to(torch.int64)
            .clamp_(max=high - low - 1)
            .add_(low)
        )

    def take_words(self, count: int) -> int:
        """Reserve the words of `count` uniforms or normals that a kernel draws by itself; returns
        the counter of the first word.
        """
        step = int(self._step) if self._host_step is None else self._host_step
        counter = step * WORDS_PER_STEP + self.offset
        self.offset += (count + 1) // 2
        return counter

    def disable_compile(self) -> None:
        """Keep torch.compile out of the draws: they store numbers for later steps."""
        self._draw = torch.compiler.disable(self._draw)  # type: ignore[method-assign]

    def _draw(self, kernel: Draw, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(shape, tuple):
            raise TypeError(
                f"wanted shape as a tuple, that of one environment, such as (3,) for [n, 3], got "
                f"{_outline(shape)}"
            )
        count = math.prod(shape)
        # a few numbers are drawn for several steps at once, if the host knows the step
        step = self._host_step if host_sync_is_free(self.device) else None
        if step is not None and 0 < self.num_envs * count <= FEW_NUMBERS:
            numbers = self._draw_ahead(kernel, shape, step)
        else:
            numbers = kernel(self.key, self.gamma, self.step, self.offset, count).reshape(
                self.num_envs, *shape
            )
        self.offset += (count + 1) // 2
        return numbers

    def _draw_ahead(self, kernel: Draw, shape: tuple[int, ...], step: int) -> Tensor:
        """[N, *shape], drawn together with those of the next steps: thirty calls cost a CPU more
        than a thousand numbers. The caller may overwrite it, because no number is drawn twice.
        """
        # what was drawn ahead, if this step is part of it
        first, blocks = self._ahead.get((kernel, self.offset, shape), (step, ()))
        if not 0 <= step - first < len(blocks):
            first = step
            with torch.inference_mode(False):  # the numbers outlive the mode that is on now
                steps = torch.arange(step, step + STEPS_AHEAD).repeat_interleave(self.num_envs)
                # as if each step were an environment of its own
                keys = self.key.repeat(STEPS_AHEAD)
                gammas = self.gamma.repeat(STEPS_AHEAD)
                numbers = kernel(keys, gammas, steps, self.offset, math.prod(shape))
                blocks = numbers.view(STEPS_AHEAD, self.num_envs, *shape).unbind(0)
            self._ahead[kernel, self.offset, shape] = step, blocks
        return blocks[step - first]

    def state_dict(self) -> dict[str, Tensor]:
        """Keys, gammas and the step."""
        return {"key": self.key, "gamma": self.gamma, "step": self.step.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict()`; ValueError if it has another number of streams."""
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
