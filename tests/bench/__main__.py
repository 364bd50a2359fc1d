"""Run every benchmark this machine can run."""

from tests.bench import host_time

host_time.main()
