"""Prometheus expositions."""

from __future__ import annotations

from dsv4_repro.forensics.evidence.gather import read_text


def test_scrapes_are_told_apart_by_repetition_and_by_part() -> None:
    scrape = (
        "# HELP vllm:num_requests_running x\n# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0"} 2.0\nvllm:generation_tokens_total{engine="0"} 5e3\n'
    )
    case = read_text("m", scrape + scrape)
    assert [m.scrape for m in case.metrics] == [1, 1, 2, 2]
    assert case.metrics[1].value == 5000.0
    case = read_text("m", f"=== a ===\n{scrape}=== b ===\n{scrape}")
    assert case.scrapes == 2


def test_labels_with_escapes_and_torn_lines() -> None:
    case = read_text(
        "m",
        'vllm:num_requests_running{model_name="a\\"b,c={}",engine="0"} '
        '1\nvllm:num_requests_running{engine="1\nvllm:kv_cache_usage_perc 0.5 1700000000000\n',
    )
    assert dict(case.metrics[0].labels) == {"model_name": 'a\\"b,c={}', "engine": "0"}
    assert [m.name for m in case.metrics] == ["vllm:num_requests_running", "vllm:kv_cache_usage_perc"]


def test_dcgm_becomes_gpu_readings() -> None:
    case = read_text(
        "m",
        'DCGM_FI_DEV_GPU_UTIL{gpu="1",Hostname="n1"} 100\nDCGM_FI_DEV_MEM_COPY_UTIL{gpu="1",Hostname="n1"} '
        '0\nDCGM_FI_DEV_POWER_USAGE{gpu="1",Hostname="n1"} 121.5\n',
    )
    (sample,) = case.gpus
    assert (sample.host, sample.index, sample.util, sample.memory_util, sample.power) == ("n1", 1, 100.0, 0.0, 121.5)


def test_foreign_metrics_are_recognised_and_dropped() -> None:
    case = read_text("m", "# TYPE go_goroutines gauge\ngo_goroutines 5\n")
    assert not case.metrics
    assert case.parts[0].unrecognised == 0
