"""`atari:<Game>`: the games of the Arcade Learning Environment, by gymnasium's names.

    atari:Pong, atari:Pong-v5, atari:ALE/Pong-v5    sticky actions 0.25 (Machado et al., 2018)
    atari:PongNoFrameskip-v4                        none (the older convention)

A name decides nothing but the stickiness. In each case ALE plays single frames, and a decision
holds its action for env.action_repeat of them, 4 unless the run says otherwise: the frame skip that
gymnasium registers for v5 can never come on top.
"""

from __future__ import annotations

from forethought.config import AtariConfig, ConfigError, unknown
from forethought.envs.atari_game import AtariGame
from forethought.envs.families import LIST_HINT, Built, require_extra, require_images

ACTION_REPEAT = 4
MAX_FRAMES = 108_000
"""Half an hour of play, after which a game is truncated; no-ops before it do not count."""
STICKY = 0.25
CONVENTIONS = {"-v5": STICKY, "NoFrameskip-v4": 0.0}
"""Endings of a name, and the sticky actions that they stand for."""

# A copy of ale_py's games for one player (a test compares them): listing must not import ALE.
GAMES = """
adventure air_raid alien amidar assault asterix asteroids atlantis atlantis2 backgammon
bank_heist basic_math battle_zone beam_rider berzerk blackjack bowling boxing breakout carnival
casino centipede chopper_command crazy_climber crossbow darkchambers defender demon_attack
donkey_kong double_dunk earthworld elevator_action enduro entombed et fishing_derby
flag_capture freeway frogger frostbite galaxian gopher gravitar hangman haunted_house hero
human_cannonball ice_hockey jamesbond journey_escape kaboom kangaroo keystone_kapers king_kong
klax koolaid krull kung_fu_master laser_gates lost_luggage mario_bros miniature_golf
montezuma_revenge mr_do ms_pacman name_this_game othello pacman phoenix pitfall pitfall2 pong
pooyan private_eye qbert riverraid road_runner robotank seaquest sir_lancelot skiing solaris
space_invaders space_war star_gunner superman surround tennis tetris tic_tac_toe_3d time_pilot
trondead turmoil tutankham up_n_down venture video_checkers video_chess video_cube
video_pinball wizard_of_wor word_zapper yars_revenge zaxxon
"""
ROMS = {rom.title().replace("_", ""): rom for rom in GAMES.split()}
"""ALE's name of a game by gymnasium's."""


def names() -> list[str]:
    """Each game once, by its shortest name."""
    return list(ROMS)


def parse(name: str) -> tuple[str, float]:
    """ALE's name of the game, and the sticky actions that the name stands for."""
    ending = next((end for end in CONVENTIONS if name.endswith(end)), "")
    # Only v5 lives in gymnasium's namespace ALE.
    namespace = "ALE/" if name.startswith("ALE/") and ending == "-v5" else ""
    game = name.removeprefix(namespace).removesuffix(ending)
    if game not in ROMS:
        candidates = [f"atari:{namespace}{known}{ending}" for known in ROMS]
        raise unknown("task", f"atari:{name}", candidates, LIST_HINT)
    return ROMS[game], CONVENTIONS.get(ending, STICKY)


def check(name: str) -> None:
    """Refuse an unknown game, or a missing extra."""
    parse(name)
    require_extra(f"atari:{name}", "atari", "ale_py", "cv2")


def build(
    name: str,
    render_mode: str | None,
    obs: str | None = None,
    *,
    action_repeat: int | None = None,
    options: AtariConfig | None = None,
) -> Built:
    """The game; it holds an action itself, because of the last frames it shows the brighter one."""
    rom, sticky = parse(name)
    options = AtariConfig() if options is None else options
    if options.sticky_actions is not None:
        sticky = options.sticky_actions
    repeat = ACTION_REPEAT if action_repeat is None else action_repeat
    env = AtariGame(rom, options, sticky, repeat, render_mode)
    if options.fire_on_reset and not env.can_fire:
        raise ConfigError(
            f"env.atari.fire_on_reset is true, but atari:{name} has no action FIRE; leave it out."
        )
    require_images(f"atari:{name}", obs, env)
    return Built(env, repeat, MAX_FRAMES, terminates=True)
