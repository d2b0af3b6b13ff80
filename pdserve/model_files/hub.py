"""Models on the Hugging Face hub, and in its cache on this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # of HTTPError
    GatedRepoError,
    HFValidationError,
    HTTPError,  # root of the errors of the hub's HTTP client, whichever that is
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pdserve.shared.errors import ConfigError
from pdserve.shared.process.may_pass import NotNow


def download(model_id: str, revision: str | None, patterns: list[str]) -> Path:
    """The directory with those files of a model; from the hub's cache when there is no network.

    Args:
        model_id: such as "Qwen/Qwen3-0.6B".
        revision: branch, tag or commit; None is the main branch.
        patterns: names of files, with wildcards.

    Raises:
        ConfigError: there is no such model.
        NotNow: neither hub nor cache have all of it.
    """
    what = f"model {model_id!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        path = snapshot_download(repo_id=model_id, revision=revision, allow_patterns=patterns)
    except HFValidationError as error:
        raise ConfigError(
            f"{model_id!r} is neither a directory nor the id of a model on the hub"
        ) from error
    except GatedRepoError as error:
        raise ConfigError(
            f"{what} is gated on the hub: accept its terms there, and set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{what} does not exist on the hub, though the model does") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{what} is neither a directory here nor a model on the hub "
            "(a private one needs HF_TOKEN)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise NotNow(
            f"{what} is not a directory, the hub cannot be reached, and its cache on this machine "
            "does not hold the whole model: give a directory, or connect to the network"
        ) from error
    except (HTTPError, OSError) as error:
        raise NotNow(f"{what} could not be downloaded from the hub: {error}") from error
    return Path(path)


def downloaded_bytes(model_id: str, cache: Path | None = None) -> int:
    """Bytes of a model that is being downloaded, by any process; 0: it is not.

    `cache` is the hub's cache on this machine, by default as `download` uses it.
    """
    folder = cache or Path(constants.HF_HUB_CACHE)
    blobs = [*(folder / f"models--{model_id.replace('/', '--')}" / "blobs").glob("*")]
    if not any(blob.suffix == ".incomplete" for blob in blobs):
        return 0
    sizes = []
    for blob in blobs:
        with suppress(FileNotFoundError):  # complete now, under another name
            sizes.append(blob.stat().st_size)
    return sum(sizes)
