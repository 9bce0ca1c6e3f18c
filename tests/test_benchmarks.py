"""The scripts in benchmarks/: collecting, measuring speed, and what a GPU has to show."""

import json
import shlex
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

import collect
import gpu_check
import readme
import throughput
from common import InputError, TrainingError
from common.run import write_json
from common.settings import read_json
from fast import Fork
from helpers import read_csv
from test_report import write_run


def test_collect_copies_a_curve_and_its_origin(tmp_path, monkeypatch):
    words = " --num-levels 200 --runs-dir " + shlex.quote(f"{tmp_path}'s runs")
    run_dir = write_run(tmp_path / "runs", "ppo", "maze", 3, 5.0, 16, words, num_levels=200, eval_interval=8)
    progress, meta, evaluations = (run_dir / name for name in ("progress.csv", "meta.json", "eval.csv"))
    evaluations.write_text("step,policy,episodic_return,standard_error\n8,stochastic,1,1\n")
    curve, origin = progress.read_text(), meta.read_text()
    part = curve[: curve.index("9,")].replace("\n8,", "\n8,9").replace(",5.0,", ",4.0,")
    killed = json.dumps(json.loads(origin) | {"finished": None})

    def collected(name, text=curve, its_origin=origin, **settings):
        """What the origin says after the run has been collected in this state."""
        progress.write_text(text)
        meta.write_text(its_origin)
        target = collect.collect(run_dir, tmp_path / name, **settings)
        assert target == tmp_path / name / "easy-200/ppo/maze/seed3.csv"
        assert target.read_text() == text
        assert target.with_suffix(".eval.csv").read_text() == evaluations.read_text()
        return read_json(target.with_suffix(".meta.json"))

    found = collected("results")
    assert found["seconds"] == float(read_csv(progress)[-1]["seconds"])
    assert "--num-levels 200" in found["command"]
    assert "runs-dir" not in found["command"]
    assert shlex.split(found["command"])[-2:] == ["--num-levels", "200"]
    assert collected("results") == found  # the same run again changes nothing
    assert collected("stopped", part, unfinished=True)["stopped_at"] == 8
    assert "stopped_at" not in collected("stopped", unfinished=True)  # the run has gone on from before
    with pytest.raises(InputError, match="let it end first"):
        collected("results", its_origin=killed)  # in its last evaluation
    with pytest.raises(InputError, match=r"another run of this seed is there \("):
        collected("results", part, unfinished=True)  # not the shorter for the longer
    write_json(run_dir / "args.json", read_json(run_dir / "args.json") | {"eval_interval": 0})  # it has gone on without
    assert collected("results") == found  # it has no checkpoint
    monkeypatch.setattr(collect, "newest_checkpoint", lambda path: {"step": 16, "run": {"rows": {"eval.csv": 1}}})
    assert collected("results") == found


def test_collect_compares_what_makes_a_run(tmp_path):
    """Not where it was run, on what, or what a resumed run may change; but what its rate was annealed to before."""
    runs, plain = tmp_path / "runs", {"learning_rate": 1e-4, "eval_num_levels": 0}

    def collect_both(first, second, flags="", **meta):
        run_dirs = [write_run(runs, "ppo", "maze", 1, 5.0, 16, **first)]
        run_dirs.append(write_run(runs, "ppo", "maze", 2, 5.0, 16, flags, **second))
        write_json(run_dirs[1] / "meta.json", read_json(run_dirs[1] / "meta.json") | meta)
        for run_dir in run_dirs:
            collect.collect(run_dir, tmp_path / run_dirs[0].name)

    same = {"total_timesteps": 8, "device": "cuda:1", "torch_deterministic": False, "checkpoint_interval": 0.5}
    same |= {"track": True, "wandb_project_name": "a b", "capture_video": True}
    collect_both(plain | {"init_from": "a"}, plain | same | {"init_from": "b"})
    collect_both(plain, plain | {"new": 1})
    collect_both(plain, plain, script=f"moved/{'x' * 300}/ppo.py")  # the same content, and no copy of it
    others = {"learning_rate": 1e-5}, {"anneal_lr": True}, {"init_from": "a"}, {"eval_num_levels": 9}
    metas = [{"ranks": 2}, {"resumed": [{"step": 64, "annealed_to": 50}]}, {"script": "ppg.py"}]
    metas.append({"script": "ideas/ppo.py", "script_sha256": "other"})
    annealed = plain | {"anneal_lr": True}
    new = plain | {"new": 1}
    pairs = [(plain, new, {"flags": " --new 1"}), (plain, plain | {"new": False}, {"flags": " --no-new"})]
    pairs.append((plain, plain | {"no_op_max": 1}, {"flags": " --no-op-max 1"}))
    pairs += [(plain, plain | each, {}) for each in others] + [(plain, plain, meta) for meta in metas]
    for first, second, meta in (*pairs, (annealed, annealed | {"total_timesteps": 8}, {})):
        with pytest.raises(InputError, match=" has other settings than maze__ppo__1__"):
            collect_both(first, second, **meta)


def measure_tiny(algorithm, file):
    """Measure iterations of 4 environments, which end with an auxiliary phase. Changes this process."""

    def shorten(algorithm, args, num_steps, iterations):
        tiny = {"num_envs": 4, "num_steps": num_steps, "num_minibatches": 1, "n_pi": 1, "batch_size": 4}
        tiny["total_timesteps"] = (1 + iterations) * 4 * num_steps
        vars(args).update({name: value for name, value in tiny.items() if name in vars(args)})

    throughput.shorten = shorten
    job = {"repeat": 0, "sweep": "", "device": "cpu", "num_steps": 4}
    write_json(file, throughput.measure(job | {"algorithm": algorithm, "configuration": "default"}))


@pytest.mark.parametrize("algorithm", ["ppo", "ppg", "impala"])
def test_throughput_measures_real_runs(algorithm, tmp_path):
    with Fork(tmp_path, measure_tiny, algorithm, tmp_path / "row.json") as process:
        assert process.wait() == 0, process.errors
    row = read_json(tmp_path / "row.json")
    assert row.keys() >= set(throughput.COLUMNS)
    assert all(row[f"{phase}_us"] > 0 for phase in ("act", "env", "learn"))
    assert (row["aux_us"] > 0) == (algorithm == "ppg")
    assert 0 < row["learn_share_of_matmul"] < 2
    assert 0 < row["share_of_matmul"] < 2
    assert 0.1 < row["peak_gb"] < 4
    # IMPALA's actor works at the same time
    busy = sum(row[f"{phase}_us"] for phase in (["learn"] if algorithm == "impala" else throughput.PHASES))
    assert busy < 1e6 / row["steps_per_second"]
    assert busy + row["wait_us"] == pytest.approx(1e6 / row["steps_per_second"])


def test_throughput_from_measurements_to_table(tmp_path, monkeypatch, capsys):
    """Configurations alternate, ratios are those of one round, and a measurement that fails is passed over."""
    speeds = {"plain": [100, 200, 100], "default": [400, 900, 500, 700]}
    times = {"act_us": 100, "env_us": 10, "learn_us": 900, "aux_us": 0, "learn_share_of_matmul": 0.5}
    known = times | {"share_of_matmul": 0.4, "aux_share_of_matmul": "", "peak_gb": 1.5}

    def measure(job):
        return job | known | {"steps_per_second": speeds[job["configuration"]][job["repeat"]]}

    monkeypatch.setattr(throughput, "alone", lambda function, job: function(job))
    monkeypatch.setattr(throughput, "measure", measure)
    monkeypatch.setattr(throughput, "measure_memory", lambda job: job | {"peak_gb": 1.234})
    monkeypatch.setattr(readme, "DOCUMENTS", (tmp_path / "README.md",))
    (tmp_path / "README.md").write_text("before\n<!-- throughput cpu -->\nold\n<!-- end of throughput cpu -->\nafter\n")
    args = throughput.Args(algorithms=("ppo",), configurations=("plain", "default"), repeats=4, device="cpu")
    args.out, args.update_readme = tmp_path, True
    with pytest.raises(TrainingError, match="ppo plain failed"):
        throughput.main(args)
    throughput.main(replace(args, from_csv=True))
    assert "ppo plain: failed (IndexError(" in capsys.readouterr().out
    made = [row["configuration"] for row in read_csv(tmp_path / "cpu.csv")]
    assert made == ["plain", "default"] * 3 + ["default"] * 2
    document, table = (tmp_path / "README.md").read_text(), (tmp_path / "cpu.md").read_text()
    assert document == f"before\n<!-- throughput cpu -->\n{table}<!-- end of throughput cpu -->\nafter\n"
    assert "| PPO default | 600 [400, 900] | 4.50 [4.00, 5.00] | " in document
    with pytest.raises(InputError, match="--configurations is empty: name one at least"):
        throughput.main(replace(args, configurations=()))
    csv = tmp_path / "cpu.csv"
    csv.write_text(csv.read_text().rpartition(",")[0])  # a cut row
    with pytest.raises(InputError, match="not whole"):
        throughput.main(replace(args, from_csv=True))


def test_what_fails_or_finds_no_time_is_left_for_another_call(tmp_path, monkeypatch, capsys):
    """What a part has started ends with it; what has failed is tried again after the others. A part may be killed."""
    done = f"open({str(tmp_path / 'done')!r}, 'a').write"
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    parts = {"resume a": child, "tests": f"{done}('t'); raise SystemExit('broken')", "speed b": f"{done}('s')"}
    parts = {name: [sys.executable, "-c", code] for name, code in parts.items()}
    monkeypatch.setattr(gpu_check, "plan", lambda args: parts)
    monkeypatch.setattr(gpu_check, "SECONDS", {"tests": 60, "resume": 1.5, "speed": 9000})

    def check(budget, left):
        assert gpu_check.main(gpu_check.Args(out=tmp_path, device="cpu", budget=budget)) == left
        return capsys.readouterr().out

    output = check(budget=600, left=3)
    assert "tests: FAILED" in output
    assert "    broken" in output
    assert "left for another call: resume a, tests, speed b\n" in output
    pid = (tmp_path / "logs" / "resume-a.log").read_text().strip()
    state = subprocess.run(["ps", "-o", "state=", "-p", pid], capture_output=True, text=True).stdout.strip()
    assert state in ("", "Z")
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('\n{"name": "tests", "rc": 0')  # on a full disk
    assert "left for another call: resume a, tests\n" in check(budget=1, left=2)  # the first part is always done
    assert (tmp_path / "done").read_text() == "ts"
    words, log = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(30)"], tmp_path / "log"
    assert gpu_check.do(words, 60, log, kill_when=lambda: "begun" in log.read_text()) == -signal.SIGKILL
