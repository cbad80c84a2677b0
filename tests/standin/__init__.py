"""A stand-in for ``vllm serve``: a **test double, never a result**. Nothing that it does was measured on a GPU or on vLLM.

It has vLLM's process layout (API process, child ``VLLM::EngineCore``, its children ``VLLM::Worker`` or ``VLLM::Worker_TP0`` …,
one process group), its HTTP (``/health /ping /version /v1/models /v1/completions /metrics``), the texts of its log (0.23.0) and an
engine that is a step clock: requests, chunked prefill, MTP by seed, CUDA-graph padding, preemption, and a wedge at a chosen live
count. With an agent folder, each worker keeps a ring file and answers ``agent ask`` in the agent's own formats. No GPU, no model.

Start it::

    python tests/standin serve MODEL [--port N] [vLLM's other flags] [--standin NAME=VALUE …]
    STANDIN="wedge=3 step_ms=5" python tests/standin serve MODEL --port 8000

Flags of vLLM that it heeds: ``--host --port --served-model-name --tensor-parallel-size --max-num-seqs --max-num-batched-tokens
--max-model-len --speculative-config --compilation-config --enforce-eager``; others are taken and ignored. Environment that it
heeds: ``STANDIN``, ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``, ``VLLM_RINGBUFFER_WARNING_INTERVAL``, ``VLLM_LOG_STATS_INTERVAL``,
``DSV4_REPRO_AGENT=1`` with ``DSV4_REPRO_AGENT_DIR`` (rings), ``DSV4_REPRO_GUARD=1`` (no wedge) and ``DSV4_REPRO_RESCUE=1`` (one
wedge of 0.2 s). ``PYTHONPATH=tests/standin/site`` makes ``python -m vllm.entrypoints.cli.main serve`` this program, and
``vllm.__version__`` says ``+standin``.

Switches (``settings.py`` has the table): all times in seconds of the stand-in's clock, which runs ``speed`` times as fast as ours.

Use it in a test::

    def test_it(stand_in):                      # a fixture of tests/conftest.py
        with stand_in(wedge=3, agent=True) as server:
            server.base_url, server.log, server.agent_folder, server.group, server.pids()
            server.set(metrics="slow:5")        # switches that may change while it runs
            server.state()                      # what the double itself knows: phase, wedged, live, workers
            server.release()                    # the wedge lifts
            server.kill_worker(0); server.rotate(); server.truncate(); server.restart()

``stand_in`` returns when ``/health`` answers (``wait=False``: at once) and always ends the whole process group.
"""
