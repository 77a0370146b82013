"""A stand-in for a service process: does what FAKE_<ROLE> says, word by word. Imports little: many are started.

rows=N       append N rows of metrics          sleep=S      sleep
exit=N       end with this code                log=TEXT     log an error
say=TEXT     write to stderr                   stubborn     ignore SIGTERM
until=PATH   wait for a file of this name
once         leave out the next word, except in the first life
alive=S      touch the sign of life for S seconds
bare         leave a child without environment, in this session
away         leave a child in a session of its own
tell         write what the launcher gave to <run_dir>/<name>.told
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# Found again by its odd duration, also without an environment.
SLEEPER = ["sleep", os.environ["FAKE_SECONDS"]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("--topology")
    parser.add_argument("--name")
    parser.add_argument("--run-dir", type=Path)
    args, flags = parser.parse_known_args()
    log = args.run_dir / "logs" / f"{args.name}.jsonl"
    log.touch()
    script = os.environ.get(f"FAKE_{args.name.upper().replace('-', '_')}", "sleep=600")
    skip = False
    for word in script.split():
        kind, _, value = word.partition("=")
        if skip:
            skip = False
        elif kind == "once":
            mark = args.run_dir / f"{args.name}.once"
            skip = mark.exists()
            mark.touch()
        elif kind == "rows":
            for batch in range(int(value)):
                row = {
                    "step": batch + 1,
                    "version": batch + 1,
                    "batch": batch,
                    "rollout/raw_reward": 0.25,
                    "lineage": 0,
                }
                row |= {"rollout/response_len/mean": 7.5, "train/loss": 0.125, "train/staleness/max": 1}
                with (args.run_dir / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(row | {"perf/tokens_per_s": 1234.0}) + "\n")
        elif kind == "sleep":
            time.sleep(float(value))
        elif kind == "log":
            import structlog

            from relax.logs.setup import configure

            configure(log, args.name)
            structlog.get_logger("fake").error(value, batch=3)
        elif kind == "join":
            from relax.launch.rundir import RunDir

            RunDir.create_or_join(args.run_dir, config=(args.run_dir / "config.yaml").read_text())
        elif kind == "alive":
            from relax.launch.rundir import RunDir

            end, sign = time.monotonic() + float(value), RunDir.load(args.run_dir).sign_of_life(args.name)
            while time.monotonic() < end:
                sign.touch()
                time.sleep(0.1)
        elif kind == "say":
            print(value, file=sys.stderr)
        elif kind == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif kind == "bare":
            subprocess.Popen(SLEEPER, env={})
        elif kind == "away":
            subprocess.Popen(SLEEPER, start_new_session=True)
        elif kind == "tell":
            told = {"environment": dict(os.environ), "flags": flags}
            (args.run_dir / f"{args.name}.told").write_text(
                json.dumps(told | {"leads_session": os.getsid(0) == os.getpid()})
            )
        elif kind == "until":
            while not Path(value).exists():
                time.sleep(0.02)
        elif kind == "exit":
            sys.exit(int(value))


if __name__ == "__main__":
    main()
