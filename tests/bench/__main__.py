"""Run every benchmark this machine can run; ``--smoke`` runs tiny sizes where there is no GPU."""

import sys

from tests.bench import decoder_step, encoder, guard_cost, host_time, memory, offload, start_up

smoke = [argument for argument in sys.argv[1:] if argument == "--smoke"]
host_time.main()
guard_cost.main(smoke)
decoder_step.main(smoke)
start_up.main(smoke)
memory.main(smoke)
offload.main(smoke)
encoder.main(smoke)
