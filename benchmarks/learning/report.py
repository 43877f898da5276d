"""`python -m benchmarks.learning.report`: docs/results.md and its pictures from the CSV files, and
from nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.learning import tables
from benchmarks.learning.outcomes import read_outcomes
from benchmarks.learning.peer_cases import PEER_CASES
from benchmarks.learning.pictures import draw, has_curves
from benchmarks.learning.results import FOLDER
from benchmarks.learning.rsl_rl_cases import MJLAB_CASES, RSL_RL_CASES
from benchmarks.learning.suite import GROUPS
from benchmarks.learning.tables import Outcomes
from benchmarks.results_table import ROOT

PAGE = ROOT / "docs" / "results.md"
INTRODUCTION = """\
# Results: returns

`python -m benchmarks.learning.report` makes this page from the files of
`learning` in [benchmarks/results](../benchmarks/results): all tables and pictures. The text of this
page stands in that script; a number in it names the commit at which it was measured.
Every training ran with one thread, flash_sac on MuJoCo (100 k steps) with two; gpurl's with the
preset of the task and the settings at the end of this page, those of other libraries with all that
stands there. A return is the mean of 100 or more episodes of the last policy ({few_episodes}
trainings, the older ones: 20 or more, see `episodes` in the files), acting greedily, on episodes
that no evaluation on the way has played. **IQM** is
the interquartile mean over seeds; the interval is a 95 % bootstrap over seeds, and over tasks
stratified by task (Agarwal et al. 2021). With few seeds it is narrower than the truth: a bootstrap
knows only the seeds it has. Below four seeds the IQM is the mean. Time is wall clock of a training,
evaluations included. Two trainings ran at a time on two cores, some beside other work: times are
upper bounds. Published numbers are of other versions of the tasks, other numbers of seeds and other
ways to evaluate, some of them more favourable than this page's ([sources](#publications)): they say
which size is usual, and not who is better. What has not been run says so.
"""
PPO = """\
MuJoCo v5 by gpurl's own environments, by one preset except Swimmer and the double pendulum. It adds
`normalize_obs_epsilon 0.1` for Ant, which keeps its 78 columns of contact forces small, and another
discount for Reacher: with 0.99 in place of 0.9 it ends at -4.9 (commit 43f4f20). What an action of
Swimmer is worth shows over hundreds of steps: by the preset of the others it stays at 50 (commit
43f4f20), with a discount of 0.999 it had a median of 158 (244cd39+), so it has rl-zoo3's
discounts, rate, epochs and noise on rollouts of 256 steps in 16 environments. The double pendulum
either stands for all 1,000 steps or falls at once, by its start. By the preset of the others it
stood for five seeds from 12 to 20 of the same 20 starts at 1 M steps, some of which it had stood
from before: once it stands, starts are rare. Of 200 starts seed 3 stood from 64 %, with an
initial deviation of 1 in place of 0.45 from 89 %, with rl-zoo3's rate, epochs and minibatches from
91 %, with these and its discounts and clipping, which it has now, from all (trainings at 22517ed).
The preset was chosen by trainings on half_cheetah, hopper and inverted_double_pendulum with seed 0,
on ant with seeds 0 and 2, on swimmer and reacher with seed 0, and that of inverted_double_pendulum
with seeds 3 and 4, so these are no fresh ones. The publications used v2
to v4, in which Ant's observations and rewards differ from v5's (contact forces). Pictures: a dashed
line is a published mean.
"""
GYMNASIUM = """\
The same preset where `gpurl train ppo HalfCheetah-v5` steps Gymnasium's own environments: eight of
them, with longer rollouts. All but HalfCheetah's seed 0 shared their core with other work.
"""
OFF_POLICY = """\
Mostly one update of 256 transitions for each environment step, as in the publications; of the
others see the settings below. An update of FlashSAC, of two critics with residual blocks of 1,024
units on 512 observations and the next ones, takes a free core of an AMD EPYC 0.32 s in float32 and,
since it multiplies in bf16, 0.16 to 0.20 s there, two cores 0.23 and 0.10 s (commit d2f9539):
90,000 updates for 100 k steps are two and a half to eight hours.
"""
DISCRETE = """\
The DQN family with rl-zoo3's budgets; and PQN, which needs no replay buffer, with more steps. All
have gpurl's presets. On LunarLander this changes two of rl-zoo3's hyper-parameters: the rate falls
to 0 and targets hold three steps. With a constant rate and single steps the last policies returned
161 and 142 (DQN), 116 and 76 (double), 258 and -11 (dueling) with seeds 0 and 1 (commits 998dac49
and 57d9541), -162 (C51) and 185 (QR) with seed 0 (998dac49). It was chosen by trainings with other
seeds, 10 to 12. Rainbow keeps the constant rate. The preset for Acrobot is a small one, 32
environments and half an update of 64×64 networks a step, which DQN learns by in seconds; it was
chosen by trainings with seeds 10 to 13. rl-zoo3's sizes for LunarLander get a little more there,
-77 and -70 (DQN), -76 (dueling), -77 (QR), -66 (C51) and -65 (Rainbow), but double DQN with seed 0
fell from -71 at 95 k steps to -317 (commits 0027a47 and 91e6477). On CartPole they have rl-zoo3's
learning rate, number of updates and target network, which 128 updates leave as it is; that preset
was chosen by trainings with seeds 0 to 4, so these are no fresh ones. With a target that follows
each update by 5 % double DQN had 314, 195 and 500, dueling DQN 378, 500 and 500 (commits 719868f
and 57d9541).
"""
BOX2D = "Gymnasium's Box2D tasks by their presets, mostly with rl-zoo3's hyper-parameters."
CLASSIC = "The smallest tasks by their presets."
CHASING = "gpurl's own task with 4096 environments, and three variants."
PRESETS = """\
What `gpurl train ALGORITHM ENV --num-envs N` gives without other settings: returns on 64, 1,024 and
4,096 environments (seeds, steps, time). On Chasing a script that pursues at full speed gets 10.4.
"""
PEERS = """\
The same task, steps, hyper-parameters and seeds, in brackets their number
([peer_cases.py](../benchmarks/learning/peer_cases.py)) for gpurl and stable-baselines3 2.9.2, each
on one core; Gymnasium's environments in both. Initial weights and random numbers are each
library's own. PPO on LunarLander ends lower here with seven of eight seeds, by 9 in the mean; the
intervals overlap, and no cause was found. Its seeds 3 to 7 shared their core with other work, in
both. Ratio: how many times as long stable-baselines3 takes.
"""
RSL_RL = """\
The same task, steps, hyper-parameters and seeds, in brackets their number
([rsl_rl_cases.py](../benchmarks/learning/rsl_rl_cases.py)) for gpurl and rsl-rl-lib, each on one
core with the same evaluations, on gpurl's own environments, which rsl-rl-lib 5.5.1 gets through
`to_rsl_rl`. Initial weights, Adam's epsilon and random numbers are each library's own. At a
time-out rsl_rl takes the value of the observation before it, gpurl that of the final one. The two
took turns on a core that other work shared, so times vary by half. Ratio: how many times as long
rsl_rl takes.
"""
MJLAB_TASK = """\
The same on a task of mjlab 1.6.0 with the settings that mjlab registers for it and 256
environments. rsl-rl-lib 5.4.2, the version that mjlab needs, trains through mjlab's own wrapper and
runner, gpurl through `torch_vector:mjlab.tasks:Mjlab-Cartpole-Balance`. The learning rate adapts to
the KL divergence after every minibatch (`--schedule kl_minibatch`), and weights begin as rsl_rl's
do (`--network.init uniform`): with gpurl's own start and one change of the rate an iteration, 30
iterations ended at 10 and 8 of 50 (seeds 0, 1). A seed balances or not: one of three fails in
either library. rsl_rl's first two runs shared their core with more other work, so the ratio says
little.
"""
GPU = """\
mjlab has published returns and times of its versions of the eleven tasks; the same sizes, steps and
hyper-parameters of each task with gpurl's own versions, by
`python -m benchmarks.learning --only gpu` on a machine with a GPU: one H200, up to four trainings
at once under CUDA's multi-process service. Times begin after the compilation of MuJoCo's kernels,
about a minute. Each has one seed so far, and with it two of the four reach mjlab's mean. Sizes:
environments × steps × epochs × minibatches.
"""
TARGETS = """\
Most were set before the trainings: PPO's on MuJoCo, for the landers and BipedalWalker from the
publications; half of Tianshou's mean at 1 M steps for SAC and TD3 at 300 k; two published standard
deviations below the mean for FlashSAC; rl-zoo3's DQN for the DQN family on LunarLander; on Chasing
about what the script gets, for the presets 9.0; on a GPU mjlab's means. Some were set or changed
when a result of the task was known: ppo-chasing-discrete (from 9.0 to 6.9, the script gets 7.06),
a2c-pendulum, those of MountainCarContinuous but for PPO's, and of Acrobot but for PPO's. Settings
were chosen by trainings with seeds of this page for PPO on MuJoCo (see there), for A2C on Pendulum
and the lander and for the DQN family on CartPole. Not reached: SAC on BipedalWalker, whose last
policy had 320 in the five episodes of the curve and 278 in 20 others, as two falls among them would
give; on a GPU the double pendulum, which falls for good from some starts (see PPO), and Reacher by
a tenth, where mjlab's seeds differ by 1.4.
"""
CLOCK = """\
Each algorithm for the same wall clock on one core, beside a training on the other one, or until the
steps in [clock_cases.py](../benchmarks/learning/clock_cases.py) are done, if that is sooner. Rates
fall with these steps: what the clock has stopped has not come to its small ones. FastSAC and
FastTD3 have batches of 512 and networks of 128×128 (Chasing), 64×64 and 128×128 (Pendulum) or
256×256 (half_cheetah) there; their publication has a GPU's sizes.
"""
SETTINGS = """\
Of gpurl what differs from the defaults, of the other libraries all that was set. A commit with +
had changes that were not committed; two of a training: it was stopped at one and went on at the
other.
"""
AGAIN = """\
```bash
make learn                                     # the small tasks, about 25 minutes on two cores
make learn SUITE=full                          # days; it may be stopped and continues
python -m benchmarks.learning --only 'ppo-*'   # some cases
python -m benchmarks.learning full --list      # what is finished
python -m benchmarks.learning.report           # this page
```
"""


@dataclass(frozen=True)
class Section:
    """A heading, what it says, a table, and a picture of a group's cases."""

    title: str
    text: str
    table: Callable[[Outcomes], list[str]]
    group: str = ""
    axis: str = "steps"


def _cases(group: str) -> Callable[[Outcomes], list[str]]:
    return lambda outcomes: tables.case_table(GROUPS[group], outcomes)


SECTIONS = (
    Section("PPO at 1 M steps", PPO, tables.ppo_table, "ppo"),
    Section("PPO on Gymnasium's MuJoCo", GYMNASIUM, _cases("gymnasium"), "gymnasium"),
    Section("Off-policy on MuJoCo", OFF_POLICY, _cases("off_policy"), "off_policy"),
    Section("Discrete actions", DISCRETE, tables.discrete_table, "discrete"),
    Section("Box2D", BOX2D, _cases("box2d"), "box2d"),
    Section("Classic control", CLASSIC, _cases("classic"), "classic"),
    Section("Chasing", CHASING, _cases("chasing"), "chasing"),
    Section("Presets of off-policy algorithms", PRESETS, tables.preset_table, "presets"),
    Section(
        "Beside stable-baselines3",
        PEERS,
        partial(tables.peer_table, PEER_CASES, "stable-baselines3"),
        "peers",
        "time",
    ),
    Section(
        "Beside rsl_rl",
        RSL_RL,
        partial(tables.peer_table, RSL_RL_CASES, "rsl_rl"),
        "rsl_rl",
        "time",
    ),
    Section(
        "Beside rsl_rl on mjlab's task",
        MJLAB_TASK,
        partial(tables.peer_table, MJLAB_CASES, "rsl_rl"),
        "mjlab",
        "time",
    ),
    Section("What a GPU has to reach", GPU, tables.gpu_table, "gpu", "time"),
    Section("Equal wall clock", CLOCK, tables.clock_table, "wall_clock", "time"),
    Section("Targets", TARGETS, tables.target_table),
    Section("Publications", "", lambda outcomes: tables.source_list()),
    Section("Settings", SETTINGS, tables.settings_table),
    Section("Machines", "", tables.machine_lines),
    Section("Again", AGAIN, lambda outcomes: []),
)


def page(outcomes: Outcomes, pictures: Sequence[str]) -> str:
    """docs/results.md; pictures: the groups that have one."""
    blocks = [INTRODUCTION.strip().format(few_episodes=tables.few_episodes(outcomes))]
    for section in SECTIONS:
        blocks.append(f"## {section.title}")
        blocks += [
            text for text in (section.text.strip(), "\n".join(section.table(outcomes))) if text
        ]
        if section.group in pictures:
            blocks.append(
                f"![{section.title}: learning curves](../benchmarks/results/learning/"
                f"{section.group}.png)"
            )
    return "\n\n".join(blocks) + "\n"


def groups_with_curves(outcomes: Outcomes) -> list[str]:
    """The groups of which a picture can be drawn."""
    return [
        section.group
        for section in SECTIONS
        if section.group
        and any(each.case.group == section.group and has_curves(each) for each in outcomes.values())
    ]


def main() -> None:
    """Write the page and the pictures."""
    outcomes = read_outcomes(FOLDER)
    drawn = groups_with_curves(outcomes)
    for section in SECTIONS:
        if section.group in drawn:
            members = [each for each in outcomes.values() if each.case.group == section.group]
            draw(members, FOLDER / f"{section.group}.png", section.axis)
    PAGE.write_text(page(outcomes, drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
