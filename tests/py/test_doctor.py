"""``python -m torchpager doctor`` on the machine the tests run on."""

import json

import torch

from torchpager import __main__ as command_line
from torchpager import doctor


def test_doctor_prints_a_table_and_exits_0_when_the_simulated_device_is_usable(run_python):
    done = run_python("-m", "torchpager", "doctor")
    assert done.returncode == 0
    for name in ("torch", "torchpager's build", "CUDA driver", "NVML", "host memory"):
        assert name in done.stdout
    assert torch.__version__ in done.stdout
    assert "Simulated device: ready" in done.stdout


def test_every_no_comes_with_something_to_do():
    for finding in doctor.examine().findings:
        assert finding.ok is not False or finding.advice, finding


def test_doctor_speaks_json_when_asked(capsys):
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["simulated"] is True
    assert report["cuda"] is torch.cuda.is_available()
    assert {"name", "ok", "found", "advice"} == set(report["findings"][0])


def test_doctor_finds_the_hidden_devices_variable(monkeypatch):
    if torch.version.cuda is None or torch.cuda.is_available():
        return
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    advice = {f.name: f.advice for f in doctor.examine().findings}
    assert "CUDA_VISIBLE_DEVICES" in advice["CUDA device"]


def test_doctor_tells_a_cpu_build_on_a_gpu_machine_from_a_machine_without_gpu():
    finding = doctor._cuda_build(None, ["/dev/nvidia0"])
    assert finding.ok is False
    assert "a CPU build, on a machine with a GPU" in finding.found
    assert "pip install" in finding.advice
    assert doctor._cuda_build(None, []).ok is None
    assert doctor._cuda_build("13.0", []).ok is True


def test_unknown_command_exits_2_with_the_usage(capsys):
    assert command_line.main(["cure"]) == 2
    assert "usage: python -m torchpager" in capsys.readouterr().err
    assert command_line.main([]) == 2
    assert command_line.main(["--help"]) == 0
    assert "usage: python -m torchpager" in capsys.readouterr().out
