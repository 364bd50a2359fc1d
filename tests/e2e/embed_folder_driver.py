"""Runs the example that embeds a folder as a user would, on two cores, with the arguments of this process.

In a process of its own because Ray leaves settings, and processes that it never waits for, in the one that started it.
"""

from __future__ import annotations

import sys

import embed_folder  # of docs/examples, which the test puts on the path of this process and of Ray's workers
import ray


def main(ray_folder: str, *arguments: str) -> int:
    """The example's exit status; everything that Ray writes lies in ``ray_folder``."""
    # With all images at hand, Ray gives every second batch to the other actor; else one may be quick enough for all.
    prepared = embed_folder.prepared
    embed_folder.prepared = lambda *given: prepared(*given).materialize()
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=ray_folder)
    try:
        return int(embed_folder.main(list(arguments)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
