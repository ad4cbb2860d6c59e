"""Which weights an engine has: by their content, not by the name of a folder."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["file_digest", "model_folder", "weights_fingerprint"]

logger = logging.getLogger(__name__)

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
#: Loaders that take the weights from the model's folder, and from nowhere else.
_FROM_FOLDER = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt",
                          "gguf", "bitsandbytes", "runai_streamer", "sharded_state"})  # fmt: skip
#: How the hub's cache names a blob: by its SHA-256, small files by Git's SHA-1.
_BLOB = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
#: A digest is noted for a file that has not changed for so long.
SETTLED_S = 5.0


def weights_fingerprint(vllm_config: VllmConfig) -> str:
    """A digest of the weights' content. Raises ConfigError where files are not found, or may not be what is loaded.

    A file from the hub's cache is named by its content hash, which is taken as it is; any other file is read in full,
    the first time.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return f"dummy weights, seed {model.seed}"
    if load.load_format not in _FROM_FOLDER or model.model_weights:
        raise ConfigError(
            f"kvpool: with load_format {load.load_format!r} the weights of this model come from elsewhere than its "
            "folder; set model_fingerprint to a text that is different for different weights"
        )
    folder = model_folder(model.model, model.revision, load.download_dir)
    files = sorted({f for pattern in _WEIGHTS for f in folder.glob(pattern)})
    if not files:
        raise ConfigError(
            f"kvpool: no weight files found for model {model.model!r} (load_format {load.load_format!r}); "
            "set model_fingerprint to a text that is different for different weights"
        )
    start = time.monotonic()
    with ThreadPoolExecutor(min(8, len(files)), "kvpool-weights") as pool:
        digests = sorted(pool.map(file_digest, files))
    logger.info("kvpool: fingerprint of %d weight files in %.1f s", len(files), time.monotonic() - start)
    return xxhash.xxh3_128_hexdigest("\n".join(digests).encode())


def model_folder(model: str, revision: str | None, download_dir: str | None = None) -> Path:
    """Where a model's files are: its own folder, or its snapshot in the hub's cache (``download_dir``, if set)."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    if folder.is_file():
        return folder.parent
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception as error:
        raise ConfigError(
            f"kvpool: the weights of model {model!r} are in no local folder ({type(error).__name__}); "
            "set model_fingerprint to a text that is different for different weights"
        ) from error


def file_digest(file: Path) -> str:
    """A digest of a file's content; read once as long as the file stays as it is, see :func:`_note`."""
    real = file.resolve()
    if real.parent.name == "blobs" and _BLOB.fullmatch(real.name):
        return real.name
    with real.open("rb", buffering=0) as stream:
        before = os.fstat(stream.fileno())
        note = _note(real, before)
        with suppress(OSError, ValueError):
            if _DIGEST.fullmatch(noted := note.read_text()):
                return noted
        digest = xxhash.xxh3_128()
        while piece := stream.read(16 << 20):
            digest.update(piece)
        after = os.fstat(stream.fileno())
    # A file that was just written may be written again within the same tick of its clock.
    if _note(real, after) == note and time.time() - after.st_ctime > SETTLED_S:
        _write(note, digest.hexdigest())
    return digest.hexdigest()


def _note(file: Path, stat: os.stat_result) -> Path:
    """Where the digest of this very file is noted, in the user's cache. Whatever writes to a file changes its ctime."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        cache = cache.expanduser()
    except RuntimeError:  # a user without a home: nothing can be noted there
        cache = Path(os.devnull)
    identity = (str(file), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return cache / "kvpool" / "weights" / xxhash.xxh3_128_hexdigest(repr(identity).encode())


def _write(note: Path, text: str) -> None:
    """Whole or not at all; without a cache to write to, the next start reads the file again."""
    fresh = note.with_name(f"{note.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text)
        fresh.replace(note)
    except OSError as error:
        logger.debug("kvpool: %s is not noted: %s", note, error)
