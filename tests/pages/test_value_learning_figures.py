"""Figures of the DQN family, SAC, TD3 and replay on the pages are those of docs/results."""

from tests.pages.figures import absent, commit_of, page, result, row, span, three_seeds

DQN, REPLAY = "docs/agents/dqn.md", "docs/replay.md"


def test_the_page_of_dqn_has_every_seed_on_minatar():
    whole, text = result("dqn_learning"), page(DQN)
    assert list(whole["members"]) == ["plain", "modern", "rainbow"]
    told = []
    for name, found in whole["members"].items():
        seeds = three_seeds(found["runs"], episodes=30)
        spans = [span(found[key]) for key in ("interval_over_seeds", "random_interval")]
        told.append(row(name, *seeds, f"{found['return_mean']:.1f}", *spans, found["aim"]))
        told.append(f"commit {commit_of(found['runs'])}")
    assert absent(told, text) == []
    plain, modern, rainbow = (found["return_mean"] for found in whole["members"].values())
    assert modern > plain > rainbow, "the page says so"


def test_the_page_of_dqn_tells_the_measured_speed():
    found = result("dqn_speed")
    summary = found["summary"]
    form = summary["sb3_fastest"]
    told = [
        f"Here {summary['ours_median']:.1f} decisions a second",
        f"there {summary[f'{form}_median']:.1f} with {form}",
        f"{summary['ratio_median']:.2f} times as many (median of {len(found['rounds'])} rounds",
        f"{summary['ratio_lowest']:.2f} in the worst",
        f"{found['date_utc'][:10]}, commit {found['commit'][:7]}",
    ]
    assert absent(told, page(DQN)) == []


def test_the_page_of_replay_tells_the_measured_speed():
    found, told = result("per_speed"), []
    for name, own in found["summary"].items():
        times = [f"{own[key]:.3f}" for key in ("sample_ms", "update_ms", "median_ms", "p10_ms")]
        kind, rows, *atari = name.split()
        words = f"{kind}, {int(rows):,} rows{' of Atari' if atari else ''}"
        told.append(row(words, *times, f"{found['memory_gb'][name]:.2f}"))
    told.append(f"{found['date_utc'][:10]}, commit {found['commit'][:7]}")
    assert absent(told, page(REPLAY)) == []


def test_the_page_of_sac_tells_the_measured_speed_of_both_agents():
    found, told = result("sac_td3_speed"), []
    for agent, of_agent in found["agents"].items():
        for threads in (1, 2):
            summary = of_agent[f"threads_{threads}"]["summary"]
            sides = []
            for side in ("ours", "sb3"):
                envs = summary["faster_envs"][side]
                speed = summary[f"{side}_{envs}_envs_median"]
                sides.append(f"{speed:.1f} with {envs} environment{'s' if envs > 1 else ''}")
            ratio = f"{summary['ratio_median']:.2f} ({summary['ratio_lowest']:.2f})"
            on = f"{agent.upper()}, {threads} thread{'s' if threads > 1 else ''}"
            told.append(row(on, *sides, ratio))
        best = of_agent["fastest_of_all"]
        speeds = [f"{best[side]:.1f}" for side in ("ours", "sb3")]
        told.append(row(f"{agent.upper()}, the fastest of all", *speeds, f"{best['ratio']:.2f}"))
    told.append(f"{found['date_utc'][:10]}, commit {found['commit'][:7]}")
    assert absent(told, page("docs/agents/sac.md")) == []
