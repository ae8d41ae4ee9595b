"""The engine ``vllm``: one vLLM server a rollout."""
