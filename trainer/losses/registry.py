"""Every loss by its name.

A new loss is one module with a parameter struct and a function, and one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from schemas.errors import ConfigError
from trainer.losses.contract import Loss, LossInputs, LossOutputs
from trainer.losses.gspo import GspoParams, gspo_loss
from trainer.losses.ppo import PpoParams, ppo_loss
from trainer.losses.sat import SatParams, sat_bandwidth, sat_gspo_bandwidth, sat_gspo_loss, sat_loss

P = TypeVar("P", bound=msgspec.Struct)


class SatEvaluate(Protocol):
    """Signature of `sat_loss` and `sat_gspo_loss`."""

    def __call__(self, inputs: LossInputs, params: SatParams) -> LossOutputs: ...


class SatBandwidth(Protocol):
    """Signature of their bandwidths."""

    def __call__(self, inputs: LossInputs, params: SatParams) -> float: ...


def _ppo(settings: Mapping[str, object]) -> Loss:
    params = _convert("ppo", settings, PpoParams)
    return Loss("ppo", partial(ppo_loss, params=params), needs_prox=params.denominator == "prox")


def _gspo(settings: Mapping[str, object]) -> Loss:
    params = _convert("gspo", settings, GspoParams)
    return Loss("gspo", partial(gspo_loss, params=params), needs_prox=params.denominator == "prox")


def _sat(settings: Mapping[str, object]) -> Loss:
    return _adaptive("sat", settings, sat_loss, sat_bandwidth)


def _sat_gspo(settings: Mapping[str, object]) -> Loss:
    return _adaptive("sat_gspo", settings, sat_gspo_loss, sat_gspo_bandwidth)


LOSSES: dict[str, Callable[[Mapping[str, object]], Loss]] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "sat": _sat,
    "sat_gspo": _sat_gspo,
}


def build_loss(name: str, settings: Mapping[str, object] | None = None) -> Loss:
    """The loss `name` with `settings` over its defaults.

    ConfigError names the known losses or the wrong setting.
    """
    if name not in LOSSES:
        raise ConfigError(
            f"unknown loss {name!r}; known: {', '.join(sorted(LOSSES))}", name=name, known=sorted(LOSSES)
        )
    return LOSSES[name](settings or {})


def _adaptive(
    name: str,
    settings: Mapping[str, object],
    evaluate: SatEvaluate,
    bandwidth: SatBandwidth,
) -> Loss:
    params = _convert(name, settings, SatParams)
    step_wide = partial(bandwidth, params=params) if params.scope == "global" else None
    return Loss(name, partial(evaluate, params=params), bandwidth=step_wide)


def _convert(name: str, settings: Mapping[str, object], params: type[P]) -> P:
    try:
        return msgspec.convert(dict(settings), params)
    except msgspec.ValidationError as error:
        known = list(params.__struct_fields__)
        raise ConfigError(
            f"loss {name!r}: {error}; settings: {', '.join(known)}", name=name, known=known
        ) from error
