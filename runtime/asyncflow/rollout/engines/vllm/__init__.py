"""The engine ``vllm``: one vLLM server per rollout."""
