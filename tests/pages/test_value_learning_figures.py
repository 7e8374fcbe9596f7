"""Figures of the DQN family, SAC, TD3 and replay on the pages are those of docs/results."""

from tests.pages.figures import absent, page, result

DQN = "docs/agents/dqn.md"


def test_the_page_of_dqn_tells_the_measured_speed():
    found = result("dqn_speed")
    summary = found["summary"]
    envs = summary["sb3_faster_envs"]
    told = [
        f"Here {summary['ours_median']:.1f} decisions a second",
        f"there {summary[f'sb3_{envs}_envs_median']:.1f} with {envs} environments",
        f"{summary['ratio_median']:.2f} times as many (median of {len(found['rounds'])} rounds",
        f"{summary['ratio_lowest']:.2f} in the worst",
        f"{found['date_utc'][:10]}, commit {found['commit'][:7]}",
    ]
    assert absent(told, page(DQN)) == []
