"""Every kernel compiles ahead of time for four generations of GPU, within bounds of spills and a
bound of registers.

The interpreter accepts programs that the compiler refuses (a loop-carried type that changes,
`break`, a global), so both are needed.
"""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from gymnasium.spaces import Discrete
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpurl.envs.registry import make_env
from gpurl.kernels import (
    adam,
    categorical_projection,
    env_step,
    finite,
    gae,
    linear_scan,
    moments,
    newest_episodes,
    pack_rows,
    permutation,
    ppo_loss,
    ppo_update,
    ppo_wide_update,
    prioritized,
    random,
    replay,
    rollout,
    sample,
    squash,
    vtrace,
)
from gpurl.kernels.backend import announced_compilation

ROOT = Path(__file__).resolve().parents[2]
NEWEST_GPU = 120
EVERY_CASE_ON = 90
ARCHITECTURES = (80, 90, 100, NEWEST_GPU)
# matrix products: each generation has instructions of its own for them
PRODUCTS = (
    ppo_update.ppo_gradient_kernel,
    ppo_wide_update.layer_forward_kernel,
    ppo_wide_update.ppo_heads_kernel,
    rollout.rollout_kernel,
)
NEWEST_TRITON = triton.__version__.startswith("3.9")
F, D, B, L, W = "*fp32", "*fp64", "*u8", "*i64", "*i32"


@dataclass
class Case:
    """One specialisation of a kernel: argument types in order, a number for each constexpr; `even`:
    integers that are multiples of 16.
    """

    kernel: Any
    types: list[Any]
    constants: dict[str, Any]
    registers: int
    num_warps: int = 4
    even: tuple[str, ...] = ()
    vectors: tuple[int, int] = (0, 0)  # 16-byte loads and stores wanted at least
    stack: int = 0  # bytes; libdevice's cosine has a path for huge angles that needs some
    name: str = ""
    architectures: tuple[int, ...] = ARCHITECTURES
    spills: int = 0  # bytes


def gae_case(
    block_t: int, block_n: int, num_warps: int, registers: int, has_valid: bool = False
) -> Case:
    types = [F, F, F, B, B, B, F, F, F, *["i32"] * 8, "fp32", "fp32"]
    arrays = ("reward", "value", "final", "terminated", "truncated", "valid")
    constants = {"HAS_VALID": has_valid, "BLOCK_T": block_t, "BLOCK_N": block_n}
    vectors = (6, 4) if block_n > 1 else (0, 0)
    return Case(
        gae.gae_kernel,
        types,
        constants,
        registers,
        num_warps,
        even=("N", *(f"{array}_stride" for array in arrays)),  # 0 without members
        vectors=vectors,
        name=f"gae {block_t}x{block_n} valid {has_valid}",
    )


def vtrace_case(registers: int, has_valid: bool) -> Case:
    types = [F, F, F, B, B, F, B, F, F, F, "i32", "i32", "fp32", "fp32", "fp32", "fp32"]
    constants = {"HAS_VALID": has_valid, "BLOCK_N": 32}
    return Case(
        vtrace.vtrace_kernel, types, constants, registers, 1, name=f"vtrace valid {has_valid}"
    )


def linear_scan_cases(block_t: int, block_w: int, num_warps: int, registers: int) -> list[Case]:
    """Forward and backward, with columns that are a multiple of 16."""
    constants = {"BLOCK_T": block_t, "BLOCK_W": block_w}
    vectors = (2, 1) if block_w > 1 else (0, 0)
    return [
        Case(kernel, types, constants, registers, num_warps, ("W",), vectors, name=name)
        for kernel, types, name in (
            (linear_scan.linear_scan_kernel, [F] * 4, f"linear scan {block_t}x{block_w}"),
            (linear_scan.linear_scan_backward_kernel, [F] * 7, f"scan back {block_t}x{block_w}"),
        )
        for types in [[*types, "i32", "i32"]]
    ]


def adam_case(decoupled: bool, has_target: bool, even: bool) -> Case:
    types = [F] * 8 + ["i32"] * 8 + ["fp32"] * 5
    arrays = ("parameters", "gradient", "exp_avg", "exp_avg_sq", "target", "first_gradient")
    constants = {
        "DECOUPLED": decoupled,
        "HAS_TARGET": has_target,
        "HAS_RECORD": True,
        "BLOCK": adam.BLOCK,
    }
    vectors = (10 + 2 * has_target, 8 + 2 * has_target) if even else (0, 0)
    return Case(
        adam.adam_kernel,
        types,
        constants,
        80,
        # strides are 0, or of members whose arrays are whole blocks
        even=(*(f"{array}_stride" for array in arrays), *(("P",) if even else ())),
        vectors=vectors,
        name=f"adam {decoupled} {has_target} {even}",
    )


def moments_case(has_valid: bool, width: int) -> Case:
    constants = {"HAS_VALID": has_valid, "BLOCK_B": moments.block_rows(width), "BLOCK_D": width}
    return Case(
        moments.block_moments_kernel,
        [F, B, D, D, D, *["i32"] * 7],
        constants,
        128,
        8,
        name=f"block moments {width} valid {has_valid}",
    )


def pack_rows_case(width: int, discrete: bool, registers: int) -> Case:
    """PPO's columns: observations, action, log-probability, value, advantage, returns, valid."""
    widths = (width, 1 if discrete else 2, 1, 1, 1, 1, 1)
    total = sum(widths)
    constants = {
        "WIDTHS": widths,
        "STARTS": tuple(itertools.accumulate(widths, initial=0))[:-1],
        "STRIDES": (0,) * 7,
        "SHIFT_STRIDES": (0,) * 4,
        "SCALE_STRIDES": (0,) * 4,
        "KINDS": (1, 0, 0, 1, 2, 1, 0),
        "SCALES": (0, 1, 1, 1, 2, 3, 4),
        "CLIPS": (10.0, *[0.0] * 6),
        "WIDTH": total + -total % 4,
        "BLOCK": pack_rows.BLOCK,
        "BLOCK_W": min(pack_rows.BLOCK_W, triton.next_power_of_2(total)),
    }
    return Case(
        pack_rows.pack_rows_kernel,
        [(F, L if discrete else F, F, F, F, F, B), (F,) * 4, (F,) * 4, F, "i32"],
        constants,
        registers,
        name=f"pack rows {width} {discrete}",
    )


def sample_case(width: int, discrete: bool, registers: int) -> Case:
    types = [F, F, F, L, L, L, L if discrete else F, L if discrete else F, F, *["i32"] * 8]
    constants = {"NUM_OUTPUTS": width, "DISCRETE": discrete, "BLOCK": sample.BLOCK}
    return Case(
        sample.sample_kernel,
        types,
        constants,
        registers,
        even=("N",),
        stack=32,
        name=f"sample {width} {discrete}",
    )


def finite_cases(widths: tuple[int, ...], registers: int) -> list[Case]:
    """The columns of a rollout: observations, then others of these widths, all contiguous."""
    columns = (F,) * len(widths)
    blocks = tuple(min(triton.next_power_of_2(width), 16) for width in widths)
    tile = {"BLOCK_T": 16, "BLOCK_N": 16}
    find = {"HAS_VALID": True, "NUM_SUCCESSOR": 1, "NUM_ENV": 3, "NUM_POLICY": 2}
    shape = {"WIDTHS": widths, "STRIDES": widths, "BLOCKS": blocks}
    kept = {f"EVIDENCE_{name}": numbers for name, numbers in shape.items()}
    members = {"MEMBER_STRIDES": (0,) * len(widths)}
    kept |= {f"{name}_MEMBER_STRIDES": (0,) * len(widths) for name in ("EVIDENCE", "KEPT")}
    name = f"{len(widths)} columns of {max(widths)}"
    return [
        Case(
            finite.find_kernel,
            [columns, B, B, B, B, L, *["i32"] * 5],
            {**shape, **members, **find, **tile},
            registers,
            8,
            name=f"find {name}",
        ),
        Case(
            finite.keep_kernel,
            [columns, columns, columns, *[L] * 4, B, *["i32"] * 7],
            {**shape, **members, **kept, **tile, "BLOCK_P": finite.BLOCK_P},
            registers,
            8,
            stack=8,  # of its addresses Triton 3.6 saves two
            name=f"keep {name}",
            spills=16,
        ),
    ]


STREAMS, CLOCKS = [L, L, L], [L, L, F]
BEGIN_STEP = [L, F, D, F, F, L, F]


def update_shape(
    sizes: tuple[int, ...], inputs: int, outputs: int, head: str, shared: bool, precision: str
) -> ppo_update.UpdateShape:
    """Parameters one after the other, as FlatAdam lays them out."""
    towers = 1 if shared else 2
    numbers = [towers * one * two for one, two in zip((inputs, *sizes), sizes)]
    numbers += [towers * size for size in sizes]
    numbers += [outputs * sizes[-1], outputs, sizes[-1], 1, outputs]
    places = list(itertools.accumulate((number + -number % 4 for number in numbers), initial=0))
    count = len(sizes)
    actor_weight, actor_bias, critic_weight, critic_bias, log_std, _ = places[2 * count :]
    return ppo_update.UpdateShape(
        inputs,
        sizes,
        "elu" if shared else "tanh",
        outputs,
        head,
        shared,
        tuple(places[:count]),
        tuple(places[count : 2 * count]),
        (actor_weight, actor_bias, critic_weight, critic_bias),
        -1 if head == "categorical" else log_std,
        precision,
    )


def ppo_gradient_case(
    sizes: tuple[int, ...],
    inputs: int,
    outputs: int,
    head: str,
    architectures: tuple[int, ...] = ARCHITECTURES,
    precision: str = "tf32x3",
    shared: bool = False,
) -> Case:
    """With clipped values and a column of valid rows where the networks are shared."""
    shape = update_shape(sizes, inputs, outputs, head, shared, precision)
    constants = ppo_update.update_constants(shape, 131_072, 16_384)
    num_warps = constants.pop("num_warps")
    is_large = max(inputs, outputs + 1) > 16
    after_action = inputs + outputs
    columns = (0, inputs, *range(after_action, after_action + 4))
    constants |= {
        "COLUMNS": (*columns, after_action + 4 if shared else -1),
        "ROW_WIDTH": (after_action + 8) // 4 * 4,
        "CLIP_VALUE": shared,
    }
    return Case(
        ppo_update.ppo_gradient_kernel,
        [F, F, L, L, L, F, F, F, *["i32"] * 6, *["fp32"] * 4],
        constants,
        255,
        num_warps,
        even=("partial_width",),
        stack=768 if is_large else 384 if NEWEST_TRITON else 128,
        name=f"ppo gradient {sizes} {inputs} {outputs} {head} {precision} {shared}",
        architectures=architectures,
        # a few where registers are nearly enough, more under Triton 3.9 and with many
        # observations: tl.dot takes no fewer rows, and NUM_WARPS says why there are no more warps
        spills=1400 if is_large else 1200 if NEWEST_TRITON else 192,
    )


def ppo_reduce_case(head: str, outputs: int, block: int) -> Case:
    shape = update_shape((64, 64), 8, outputs, head, False, "tf32x3")
    constants = {
        "NUM_PARAMETERS": 16_384,
        "NUM_OUTPUTS": outputs,
        "HEAD": ppo_update.HEADS[head],
        "LOG_STD": shape.log_std,
        "LOG_STDS": ppo_update.LOG_STDS_AT,
        "CLIP": True,
        "ROWS": ppo_update.REDUCE_NUMBERS // block,
        "SUM_ROWS": ppo_update.SUM_ROWS,
        "BLOCK": block,
        "WIDTH": triton.next_power_of_2(outputs),
        "BLOCK_PARTIAL": adam.BLOCK_PARTIAL,
    }
    return Case(
        ppo_update.ppo_reduce_kernel,
        [F, F, F, F, F, D, W, *BEGIN_STEP, *["i32"] * 4, *["fp32"] * 5],
        constants,
        128,
        even=("partial_width", "sums_width"),
        name=f"ppo reduce {head} {block}",
    )


def layer_forward_case(precision: str) -> Case:
    """Of 512-256-128 ELU: the second layer."""
    tile = ppo_wide_update.TILES[precision]
    blocks = {"BLOCK_ROWS": tile.rows, "BLOCK_OUT": tile.columns, "BLOCK_K": tile.depth}
    return Case(
        ppo_wide_update.layer_forward_kernel,
        [F, F, F, F, *["i32"] * 5],
        {"ACTIVATION": 1, "PRECISION": precision} | blocks,
        255,
        tile.num_warps,
        even=("num_in", "num_out", "x_width", "x_step"),
        name=f"layer forward {precision}",
    )


def slope_case(activation: int) -> Case:
    rows, columns = ppo_wide_update.SLOPE_TILE
    return Case(
        ppo_wide_update.slope_kernel,
        [F, F, F, "i32", "i32", "i32"],
        {"ACTIVATION": activation, "BLOCK_ROWS": rows, "BLOCK_OUT": columns},
        72,
        even=("num_rows", "num_out", "group_rows"),
        vectors=(2, 1) if activation >= 0 else (1, 0),
        name=f"slope {activation}",
    )


def ppo_heads_case(head: str) -> Case:
    """20 actions or logits, after 60 observations."""
    constants = {
        "NUM_OUTPUTS": 20,
        "HEAD": ppo_update.HEADS[head],
        "CLIP_VALUE": True,
        "COLUMNS": (0, 60, 80, 81, 82, 83, 84),
        "ROW_WIDTH": 88,
        "SUMS_WIDTH": ppo_update.SUMS,
        "LOG_STDS": ppo_update.LOG_STDS_AT,
        "PRECISION": ppo_wide_update.HEAD_PRECISION,
        "WIDTH": 32,
        "BLOCK": ppo_wide_update.HEAD_ROWS,
        "BLOCK_K": ppo_wide_update.TILES[ppo_wide_update.HEAD_PRECISION].depth,
    }
    return Case(
        ppo_wide_update.ppo_heads_kernel,
        [*[F] * 9, *["i32"] * 4, *["fp32"] * 4],
        constants,
        192,
        even=("num_in", "weight_step"),
        name=f"ppo heads {head}",
    )


def replay_case(
    obs: str, out: str, obs_size: int, num_steps: int, draws: bool, block_b: int, block_d: int
) -> Case:
    types = [
        obs,
        F,
        B,
        "*i32",
        obs,
        L,
        L,
        *STREAMS,
        L,
        out,
        F,
        F,
        F,
        out,
        F,
        *["i32"] * 5,
        "fp32",
        *["i32"] * 10,
    ]
    constants = {
        "D": obs_size,
        "W": 9,
        "NUM_STEPS": num_steps,
        "DRAWS": draws,
        "BLOCK_B": block_b,
        "BLOCK_D": block_d,
        "BLOCK_W": 16,
    }
    name = f"replay {obs} {obs_size} n {num_steps} draws {draws}"
    # a 64-bit division is a call, around which ptxas saves a few numbers rather than take more than
    # 48 registers
    return Case(replay.replay_sample_kernel, types, constants, 64, stack=16, spills=32, name=name)


def triton_env(name: str, options: dict[str, Any]) -> tuple[env_step.TritonEnv, int, bool]:
    """(what the kernels take, numbers of an action or choices, whether these are choices)."""
    env = make_env(name, 2, "cpu", 0, **options)
    env.reset()
    task, clocks, streams = (
        env.triton_task(),
        env_step.Clocks(*[env.episode_length_buf] * 3),
        env_step.RandomStreams(*[env.episode_length_buf] * 3),
    )
    space = env.single_action_space
    discrete = isinstance(space, Discrete)
    made = env_step.TritonEnv(
        task, tuple(env._state.values()), clocks, streams, env.single_observation_space.shape[0], 9
    )
    return made, int(space.n) if discrete else space.shape[0], discrete


def env_step_case(name: str, registers: int, **options: Any) -> Case:
    env, width, discrete = triton_env(name, options)
    types = [
        (F,) * len(env.states),
        *CLOCKS,
        L if discrete else F,
        *STREAMS,
        F,
        F,
        F,
        B,
        B,
        B,
        F,
        L,
        B,
        "i32",
        "i64",
    ]
    constants = env_step.env_constants(env) | {
        "BLOCK": env_step.BLOCK,
        "ACTION_WIDTH": 1 if discrete else width,
    }
    return Case(
        env_step.env_step_kernel,
        types,
        constants,
        registers,
        2,
        even=("N",),
        stack=40,
        name=f"step {name} {options}",
        spills=8,  # two numbers, beside a branch
    )


def rollout_case(
    name: str,
    sizes: tuple[int, ...],
    precision: str = "tf32x3",
    architectures: tuple[int, ...] = (90,),
    **options: Any,
) -> Case:
    env, width, discrete = triton_env(name, options)
    shape = rollout.PolicyShape(sizes, "tanh", width, discrete, False, 10.0, precision)
    layers, ends = [(F,) * len(sizes)] * 2, [F] * 10
    types = [(F,) * len(env.states), *CLOCKS, *STREAMS, *STREAMS, *layers, *ends]
    types += [F, L if discrete else F, *[F] * 4, B, B, F, F, F, "i32", "i32", "i64"]
    constants = rollout.rollout_constants(env, shape)
    label = f"rollout {name} {sizes} {precision} {options}"
    return Case(
        rollout.rollout_kernel,
        types,
        constants,
        255,
        rollout.NUM_WARPS,
        ("N",),
        stack=40,
        name=label,
        architectures=architectures,
        spills=32,  # a few numbers, where registers are nearly enough
    )


def random_case(normal: bool) -> Case:
    types = [L, L, L, F, *["i32"] * 8]
    return Case(
        random.random_kernel,
        types,
        {"NORMAL": normal, "BLOCK": 512},
        72,
        stack=32 * normal,
        name=f"random normal {normal}",
    )


def permutation_case(size: int, registers: int) -> Case:
    rounds = permutation.permutation_network(size)[2]
    constants = {"ROUNDS": rounds, "BLOCK": permutation.BLOCK}
    return Case(
        permutation.permutation_kernel,
        [L, L, L, L, *["i32"] * 7],
        constants,
        registers,
        name=f"permutation {size}",
    )


def gather_rows_case(
    size: int, width: int, registers: int, vectors: tuple[int, int] = (0, 0)
) -> Case:
    rounds = permutation.permutation_network(size)[2]
    block_width = min(triton.next_power_of_2(width), permutation.MAX_TILE_WIDTH)
    tile = {"BLOCK_ROWS": max(permutation.BLOCK // block_width, 1), "BLOCK_WIDTH": block_width}
    constants = {"WIDTH": width, "ROUNDS": rounds, **tile}
    types = [F, L, L, L, F, *["i32"] * 10]
    return Case(
        permutation.gather_rows_kernel,
        types,
        constants,
        registers,
        even=("packed_stride",),  # 0 without members
        vectors=vectors,
        name=f"gather rows {size}x{width}",
    )


def block_sums_case(even: bool) -> Case:
    constants = {"BLOCK": prioritized.BLOCK}
    even_names, vectors = (("S",), (2, 0)) if even else ((), (0, 0))
    return Case(
        prioritized.block_sums_kernel,
        [F, D, "i32"],
        constants,
        40,
        even=even_names,
        vectors=vectors,
        name=f"block sums even {even}",
    )


def draw_case(size: int) -> Case:
    """Of one entry, whose number Triton makes a constant, and of many."""
    ones = {"S": 1} if size == 1 else {}
    constants = {
        "SEARCH_STEPS": triton.cdiv(size, prioritized.BLOCK).bit_length(),
        "BLOCK": prioritized.BLOCK,
    }
    types = [F, D, D, D, W, L, L, L, L, F] + ["i32"] * (3 - len(ones))
    even, vectors = (("S",), (2, 0)) if size % 16 == 0 else ((), (0, 0))
    return Case(
        prioritized.draw_kernel,
        types,
        constants | ones,
        72,
        even=even,
        vectors=vectors,
        stack=8,  # one number, by Triton 3.9 for sm_120
        spills=8,
        name=f"prioritized draw {size}",
    )


def ppo_loss_case(kind: str, width: int, everything: bool, registers: int) -> Case:
    """`everything`: weights and a clip of the value, or none of them; width 1: all integers that
    may be 1 are.
    """
    block_b, block_a, num_warps = ppo_loss._tile(width)
    flags = dict.fromkeys(("HAS_WEIGHT", "CLIP_VALUE"), everything)
    constants = {"IS_GAUSSIAN": kind == "gaussian", **flags, "BLOCK_B": block_b, "BLOCK_A": block_a}
    integers = ("B", "A", "output_stride", "value_stride", "action_stride", "stride")
    ones = (
        dict.fromkeys(integers, 1) if width == 1 else {}
    )  # Triton makes a constant of an integer that is 1
    action = F if kind == "gaussian" else L
    types = [F] * 3 + [action] + [F] * 10 + ["i32"] * (6 - len(ones) + 7) + ["fp32"] * 4
    name = f"ppo loss {kind} {width} {'all' if everything else 'plain'}"
    return Case(ppo_loss.ppo_loss_kernel, types, constants | ones, registers, num_warps, name=name)


def ppo_sums_case(kind: str, width: int, block_k: int) -> Case:
    constants = {
        "IS_GAUSSIAN": kind == "gaussian",
        "BLOCK_P": ppo_loss.SUMS_BLOCK // block_k,
        "BLOCK_K": block_k,
        "BLOCK_A": width,
    }
    ones = {"P": 1, "A": 1} if width == 1 else {}
    types = [F] * 6 + ["i32"] * (2 - len(ones) + 2) + ["fp32"] * 3
    return Case(
        ppo_loss.ppo_sums_kernel, types, constants | ones, 112, name=f"ppo sums {kind} {width}"
    )


def projection_case(num_atoms: int, has_shift: bool) -> Case:
    block_r, block_z = categorical_projection._tile(num_atoms)
    constants = {"HAS_SHIFT": has_shift, "BLOCK_R": block_r, "BLOCK_Z": block_z}
    types = [F] * 5 + ["i32"] * 3 + ["fp32"] * 2
    name = f"categorical projection {num_atoms} shift {has_shift}"
    kernel = categorical_projection.categorical_projection_kernel
    return Case(kernel, types, constants, 40, categorical_projection.NUM_WARPS, name=name)


def squash_cases(num_actions: int, registers: int, vectors: tuple[int, int] = (0, 0)) -> list[Case]:
    """The draw and its way back; `vectors` of the draw."""
    block_b, block_a = squash._tile(num_actions)
    constants = {"A": num_actions, "BLOCK_B": block_b, "BLOCK_A": block_a}
    limits = dict(zip(("MIN_LOG_STD", "MAX_LOG_STD"), squash.LOG_STD_LIMITS))
    # Triton makes a constant of an integer that is 1
    ones = {"log_prob_stride": 1} | ({"action_stride": 1} if num_actions == 1 else {})
    draw_types, backward_types = (
        [F, F, F, F, F, B, "i32"],
        [F, F, B, F, F, F, "i32"] + ["i32"] * (2 - len(ones)),
    )
    draw_name, backward_name = f"squashed draw {num_actions}", f"squashed backward {num_actions}"
    return [
        Case(
            squash.squashed_sample_kernel,
            draw_types,
            constants | limits,
            registers,
            squash.NUM_WARPS,
            vectors=vectors,
            name=draw_name,
        ),
        Case(
            squash.squashed_backward_kernel,
            backward_types,
            constants | ones,
            registers,
            squash.NUM_WARPS,
            name=backward_name,
        ),
    ]


CASES = [
    *(gae_case(8, 32, 1, 112, valid) for valid in (False, True)),
    # of fewer than 1024 environments: 32 programs at most, each alone on its multiprocessor
    *(gae_case(64, 32, 8, 168, valid) for valid in (False, True)),
    *(gae_case(256, 1, 2, 72, valid) for valid in (False, True)),
    *(vtrace_case(64, valid) for valid in (False, True)),
    *linear_scan_cases(8, 32, 1, 128),
    *linear_scan_cases(64, 32, 8, 128),
    *linear_scan_cases(256, 1, 2, 72),
    Case(gae.gae_moments_kernel, [F, F, "i32"], {"BLOCK_P": 128}, 48, name="gae moments"),
    *(
        Case(
            adam.norm_kernel,
            [F, D, W, *BEGIN_STEP, *["i32"] * 9, "fp32", "fp32"],
            {
                "CLIP": clip,
                "HAS_RECORD": True,
                "BLOCK": adam.BLOCK,
                "BLOCK_PARTIAL": adam.BLOCK_PARTIAL,
            },
            48,
            even=("P", "gradient_stride"),
            vectors=(2, 0),
            name=f"norm {clip}",
        )
        for clip in (False, True)
    ),
    *(
        adam_case(decoupled, has_target, even)
        for decoupled in (False, True)
        for has_target in (False, True)
        for even in (False, True)
    ),
    *(ppo_reduce_case(head, 2, 64) for head in ppo_update.HEADS),
    ppo_reduce_case("gaussian", 20, 512),
    *map(layer_forward_case, ppo_wide_update.TILES),
    *map(slope_case, (1, ppo_wide_update.LINEAR.value)),
    *(ppo_heads_case(head) for head in ppo_update.HEADS),
    ppo_gradient_case((64, 64), 8, 2, "gaussian"),
    ppo_gradient_case((64, 64), 60, 20, "squashed", (90, 100)),
    ppo_gradient_case((64, 64), 4, 2, "categorical", (90, 100), shared=True),
    ppo_gradient_case((16, 16), 8, 2, "gaussian"),
    ppo_gradient_case((32, 32), 8, 2, "gaussian"),
    ppo_gradient_case((64, 64), 8, 2, "gaussian", precision="tf32"),
    ppo_gradient_case((64, 64), 60, 20, "gaussian", (90, 100), "tf32"),
    ppo_gradient_case((32, 32), 8, 2, "squashed", precision="tf32"),
    *(
        case
        for widths in ((12, 1, 3, 1, 1, 1), (348, 1, 348, 17, 1))
        for case in finite_cases(widths, 128)
    ),
    *(moments_case(valid, width) for valid in (False, True) for width in (1, 8, 32)),
    *(
        Case(
            moments.merge_moments_kernel,
            [D, D, D, D, D, F, F, *["i32"] * 9, "fp32"],
            {"BLOCK_D": width, "LANES": moments.MERGED // width},
            128,
            name=f"merge moments {width}",
        )
        for width in (1, 8, 32)
    ),
    *(pack_rows_case(width, discrete, 128) for width in (8, 348) for discrete in (False, True)),
    Case(
        moments.normalize_kernel,
        [F, F, F, F, *["i32"] * 5, "fp32"],
        {"BLOCK": 1024},
        48,
        even=("size", "x_stride"),
        vectors=(2, 2),
        name="normalize",
    ),
    *(
        permutation_case(size, 64) for size in (5, 1000, 100_003, 131_072)
    ),  # 33, 9 and 5 rounds, with walks; without
    *(gather_rows_case(size, 16, 64, (2, 2)) for size in (5, 100_003, 131_072)),
    *(gather_rows_case(131_072, width, 64, (2, 2)) for width in (8, 96, 2048)),
    *(gather_rows_case(131_072, width, 64) for width in (1, 11)),
    *(block_sums_case(even) for even in (False, True)),
    Case(
        prioritized.prefix_kernel,
        [D, D, D, W, "i32", "i32"],
        {"BLOCK": prioritized.PREFIX_BLOCK},
        96,
        8,
        name="prefix",
    ),
    *(draw_case(size) for size in (1, 1023, 200_000, 5_000_000, 1 << 26)),
    Case(
        prioritized.clear_priorities_kernel,
        [W, L, "i32"],
        {"BLOCK": prioritized.UPDATE_BLOCK},
        32,
        name="clear priorities",
    ),
    Case(
        prioritized.raise_priorities_kernel,
        [W, L, F, "i32"],
        {"BLOCK": prioritized.UPDATE_BLOCK},
        32,
        name="raise priorities",
    ),
    random_case(False),
    random_case(True),
    *(
        replay_case(obs, F, 60, num_steps, draws, 16, 64)
        for obs in (F, "*bf16")
        for num_steps in (1, 3)
        for draws in (False, True)
    ),
    replay_case(F, F, 376, 3, True, 4, 256),
    replay_case(B, B, 7056, 1, True, 4, 256),
    env_step_case("chasing", 64),
    env_step_case("chasing", 64, discrete=True),
    env_step_case("chasing", 136, dim=8),
    env_step_case("cart_pole", 56),
    env_step_case("pendulum", 56),
    *(
        sample_case(*case)
        for case in ((2, False, 64), (8, False, 96), (2, True, 64), (18, True, 128))
    ),
    Case(
        newest_episodes.keep_newest_kernel,
        [F, B, F, L, *["i32"] * 5],
        {"BLOCK": newest_episodes.BLOCK},
        32,
        name="newest episodes",
    ),
    rollout_case("chasing", (64, 64), architectures=ARCHITECTURES),
    rollout_case("chasing", (64, 64), "tf32"),
    rollout_case("cart_pole", (64, 64)),
    # Triton before 3.9 refused these while the value of final observations was selected after its
    # branch
    rollout_case("cart_pole", (64, 64), velocities=False),
    rollout_case("chasing", (16,), dim=1, discrete=True),
    rollout_case("pendulum", (32, 32)),
    *(
        ppo_loss_case(kind, width, everything, registers)
        for kind in ("gaussian", "categorical")
        for width, everything, registers in (
            (1, True, 48),
            (2, False, 48),
            (8, True, 104),
            (18, True, 144),
            (128, False, 144),
        )
    ),
    *(
        projection_case(num_atoms, has_shift)
        for num_atoms in (51, 101, 251)
        for has_shift in (False, True)
    ),
    *(case for sizes in ((1, 64), (8, 48, (3, 2)), (21, 64)) for case in squash_cases(*sizes)),
    *(
        ppo_sums_case(*sizes)
        for sizes in (
            ("categorical", 2, 8),
            ("gaussian", 1, 8),
            ("gaussian", 8, 16),
            ("gaussian", 128, 16),
        )
    ),
]


def compile_case(case: Case, architecture: int) -> Any:
    """The compiled kernel, pointers and `even` integers taken for multiples of 16 as the launcher
    takes them.
    """
    names = case.kernel.arg_names
    signature = dict(
        zip([name for name in names if name not in case.constants], case.types, strict=True)
    ) | dict.fromkeys(case.constants, "constexpr")
    signature = {name: signature[name] for name in names}
    places = [
        (i,)
        for i, name in enumerate(names)
        if str(signature[name]).startswith("*") or name in case.even
    ]
    places += [
        (i, j)
        for i, name in enumerate(names)
        if isinstance(signature[name], tuple)
        for j in range(len(signature[name]))
    ]
    hints = {place: [["tt.divisibility", 16]] for place in places}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=case.constants, attrs=hints)
    return triton.compile(
        source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": case.num_warps}
    )


def resources(message: str) -> tuple[int, int, int]:
    """(registers, bytes of stack, bytes of spills) in what Triton's own assembler said of a kernel,
    called as Triton calls it.
    """
    used = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*Used (\d+) "
        r"registers",
        message,
        re.DOTALL,
    )
    assert used, message
    stack, stores, loads, registers = map(int, used.groups())
    return registers, stack, stores + loads


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")  # to what `resources` reads


def chosen_cases() -> list[Any]:
    """Each case with each generation if it multiplies matrices. Of other kernels each case with one
    generation; with the older ones the first, and the one that may take most registers, as nothing
    but the choice of registers differs; with the newest the first of any kernel.
    """
    first, tightest = dict[Any, Case](), dict[Any, Case]()
    for case in CASES:
        first.setdefault(case.kernel, case)
        tightest[case.kernel] = max(
            tightest.get(case.kernel, case), case, key=lambda each: each.registers
        )
    seen = set[tuple[Any, int]]()
    chosen = []
    for case in CASES:
        for number in case.architectures:
            is_first = (case.kernel, number) not in seen
            is_typical = case in (first[case.kernel], tightest[case.kernel])
            if number == NEWEST_GPU:
                is_chosen = is_first
            else:
                is_chosen = number == EVERY_CASE_ON or case.kernel in PRODUCTS or is_typical
            if is_chosen:
                seen.add((case.kernel, number))
                name = f"{case.name}-sm_{number}{'-first' if is_first else ''}"
                chosen.append(pytest.param(case, number, id=name))
    return chosen


@pytest.mark.parametrize(("case", "architecture"), chosen_cases())
def test_compiles_within_bounds(
    case: Case, architecture: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asm = compile_case(case, architecture).asm
    ptx = asm["ptx"]
    assert ("tt.dot" in asm["ttir"]) == (case.kernel in PRODUCTS)
    # reads behind its operand in shared memory, which Triton does not pad (triton issue 10629)
    assert "wgmma.mma_async.sync.aligned.m64n8k" not in ptx
    registers, stack, spilled = resources(capsys.readouterr().out)
    assert spilled <= case.spills
    assert stack <= case.stack
    assert registers <= case.registers
    loads, stores = (
        len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
    )
    assert loads >= case.vectors[0]
    assert stores >= case.vectors[1]


def test_a_spilling_kernel_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    compile_case(gae_case(64, 32, 1, 0), 90)
    assert resources(capsys.readouterr().out)[2] > 0


def test_every_kernel_stands_in_the_table() -> None:
    tested = {case.kernel.fn.__name__ for case in CASES}
    for path in (ROOT / "kernels").glob("*.py"):
        defined = set(re.findall(r"@triton\.jit[^\n]*\ndef (\w+_kernel)\(", path.read_text()))
        assert defined <= tested, path.name


def test_the_first_kernel_that_is_compiled_is_announced_once() -> None:
    announced = list[str]()
    for expected in (["now"], ["now"]):  # the second time all are in Triton's cache
        with announced_compilation(lambda: announced.append("now")):
            for case in CASES[:2]:
                compile_case(case, 90)
        assert announced == expected
    assert triton.knobs.compilation.listener is None
