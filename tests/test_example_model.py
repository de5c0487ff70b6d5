"""The demo's model and trainer: routing recorded, replayed and compared; generation; weights and state."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.async_rl import task  # noqa: E402
from examples.async_rl import train as tr  # noqa: E402
from examples.async_rl.model import MODEL, MoETransformer, generate  # noqa: E402
from examples.async_rl.weights import (  # noqa: E402
    load_optimizer,
    load_weights,
    save_optimizer,
    save_weights,
)

CONFIG = tr.TrainConfig(warm_start_steps=60, warm_start_batch=32)
WORDS = task.words()[1]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(one_thread) -> MoETransformer:
    return tr.warm_start(0, CONFIG)[0]


@pytest.fixture(scope="module")
def small(model) -> MoETransformer:
    return load_weights(save_weights(model, torch.bfloat16))


def sample(model, words, seeds, temperature=1.0):
    prompts = [task.prompt_of(w) for w in words]
    return generate(model, prompts, task.MAX_NEW, temperature, seeds, eos=task.EOS)


def test_task():
    assert (task.VOCAB_SIZE, task.MAX_TOKENS) == (MODEL.vocab_size, MODEL.max_tokens)
    train, held_out = task.words()
    assert not set(train) & set(held_out) and len(held_out) > 100 and len(train) > 1000
    assert all(w.isascii() and w.isalpha() and w.islower() and 3 <= len(w) <= 7 for w in train + held_out)
    assert task.decode(task.prompt_of("abc") + task.target_of("abc")) == "^abc>cba$"
    assert len(task.prompt_of("abcdefg") + task.target_of("abcdefg")) == task.MAX_TOKENS
    assert task.reward("abc", task.encode("cba$")) == 1.0
    assert task.reward("abc", task.encode("cbx$")) == 0.375
    assert task.reward("abc", task.encode("cba")) == 0.375
    assert task.reward("abc", task.encode("cba$aaaa")) == 0.25
    assert task.reward("abc", []) == 0.0
    assert task.demonstration("python", random.Random(0), 0.0) == task.encode("no$")


def test_generated_fields(small):
    for word, g in zip(WORDS[:16], sample(small, WORDS[:16], range(16)), strict=True):
        n, prompt = len(g.tokens), task.prompt_of(word)
        assert g.tokens.dtype == torch.int32 and g.tokens[: len(prompt)].tolist() == prompt
        assert g.mask.dtype == torch.bool and g.mask.tolist() == [i >= len(prompt) for i in range(n)]
        assert g.logprobs.dtype == torch.float32 and g.logprobs.shape == (n,)
        assert bool((g.logprobs[g.mask] <= 0).all()) and not g.logprobs[~g.mask].any()
        assert g.routing.dtype == torch.uint8
        assert g.routing.shape == (n - 1, MODEL.n_layers, MODEL.top_k)
        assert bool((g.routing[..., 0] != g.routing[..., 1]).all()) and int(g.routing.max()) < 8
        assert 1 <= len(g.completion) <= task.MAX_NEW and task.EOS not in g.completion[:-1]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_cached_generation_equals_a_full_forward(model, temperature):
    generations = sample(model, WORDS[:32], range(32), temperature)
    batch = tr.collate_generations(generations)
    with torch.no_grad():
        logp, _ = tr.token_logprobs(model, batch, temperature=temperature)
    torch.testing.assert_close(logp[batch.mask], batch.logprobs[batch.mask], atol=2e-5, rtol=0)


def test_padding_on_either_side_changes_nothing(model):
    tokens = torch.tensor([task.prompt_of("abc")])
    alone, routing = model(tokens)
    left = torch.nn.functional.pad(tokens, (3, 0))
    right = torch.nn.functional.pad(tokens, (0, 3))
    for padded, real in ((left, slice(3, None)), (right, slice(0, -3))):
        valid = torch.zeros_like(padded, dtype=torch.bool)
        valid[:, real] = True
        logits, used = model(padded, valid=valid)
        torch.testing.assert_close(logits[:, real], alone, atol=2e-5, rtol=0)
        assert torch.equal(used[:, real], routing)


def test_replay_of_own_routing_is_bit_exact(model):
    batch = tr.collate_generations(sample(model, WORDS[:32], range(32)))
    logits, routing = model(batch.tokens, valid=batch.valid)
    again, used = model(batch.tokens, routing=routing, valid=batch.valid)
    assert torch.equal(used, routing) and torch.equal(again, logits)


def test_gradient_reaches_the_router_through_replayed_gates(model, small):
    batch = tr.collate_generations(sample(small, WORDS[:8], range(8)))
    logp, _ = tr.token_logprobs(model, batch)
    loss, clipped = tr.grpo_loss(logp, batch, torch.linspace(-1, 1, 8), CONFIG)
    model.zero_grad()
    loss.backward()
    for moe in model.moe:
        assert float(moe.router.grad.abs().sum()) > 0
        assert float(moe.up.grad.abs().sum()) > 0
    assert 0 <= float(clipped) <= 1
    model.zero_grad()


def test_grpo_loss_by_hand():
    zeros = torch.zeros(2, 3)
    mask = torch.tensor([[False, True, True], [False, True, False]])
    routing = torch.zeros(2, 2, 1, 1, dtype=torch.uint8)
    batch = tr.TokenBatch(zeros.long(), mask, torch.ones_like(mask), zeros, routing)
    logp = torch.tensor([[9.0, 1.5, 0.9], [9.0, 0.5, 9.0]]).log()
    loss, clipped = tr.grpo_loss(logp, batch, torch.tensor([1.0, -2.0]), tr.TrainConfig())
    assert float(loss) == pytest.approx(-(1.28 + 0.9 - 2 * 0.8) / 3)
    assert float(clipped) == pytest.approx(2 / 3)
    each, _ = tr.grpo_loss(logp, batch, torch.tensor([[1.0], [-2.0]]).expand(2, 3), tr.TrainConfig())
    assert float(each) == pytest.approx(float(loss))


def test_float32_inference_routes_as_the_trainer_does(model):
    for seed in range(4):
        words = WORDS[seed * 32 : seed * 32 + 32]
        batch = tr.collate_generations(sample(model, words, range(seed * 32, seed * 32 + 32)))
        _, used = tr.token_logprobs(model, batch, replay=False)
        real = batch.valid[:, 1:]
        assert torch.equal(used[real], batch.routing[real])


def test_replay_matters_in_bfloat16(model, small):
    found = tr.mismatch(model, sample(small, WORDS, range(len(WORDS))))
    assert found.flips > 0
    assert found.own > 1.3 * found.replayed
    assert min(found.shifted, found.other) > 10 * found.replayed
    control = tr.mismatch(model, sample(model, WORDS[:64], range(64)))
    assert control.flips == 0 and max(control.own, control.replayed) < 1e-5


def test_sampling_noise_does_not_depend_on_the_batch(model):
    words, seeds = WORDS[:12], [random.Random(i).getrandbits(62) for i in range(12)]
    together = sample(model, words, seeds)
    for word, seed, g in zip(words, seeds, together, strict=True):
        alone = sample(model, [word], [seed])[0]
        assert torch.equal(alone.tokens, g.tokens) and torch.equal(alone.routing, g.routing)
        torch.testing.assert_close(alone.logprobs, g.logprobs, atol=2e-5, rtol=0)
    again = sample(model, words, seeds)
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(together, again, strict=True))
    other = sample(model, words, [seed + 1 for seed in seeds])
    assert any(not torch.equal(a.tokens, b.tokens) for a, b in zip(together, other, strict=True))


def test_sampling_follows_the_distribution(model):
    draws = sample(model, ["cat"] * 2000, range(2000))
    with torch.no_grad():
        probs = model(torch.tensor([task.prompt_of("cat")]))[0][0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([g.completion[0] for g in draws]), minlength=task.VOCAB_SIZE)
    assert float((counts / 2000 - probs).abs().max()) < 0.04


def test_weights_and_optimizer_state_round_trip(model, small, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    weights = save_weights(model, torch.bfloat16)
    kinds = {name: w.dtype for name, w in weights.items()}
    assert {k for n, k in kinds.items() if n.endswith("router")} == {torch.float32}
    assert {k for n, k in kinds.items() if not n.endswith("router")} == {torch.bfloat16}

    batch = tr.collate_generations(sample(small, WORDS[:16], range(16)))
    advantages = torch.linspace(-1, 1, 16)

    def steps(model, optimizer, seeds):
        return [tr.train_step(model, optimizer, batch, advantages, CONFIG, seed=s) for s in seeds]

    straight = load_weights(save_weights(model))
    optimizer = tr.make_optimizer(straight, CONFIG.lr)
    steps(straight, optimizer, [1])
    safetensors.save_file(save_weights(straight), tmp_path / "weights.safetensors")
    safetensors.save_file(save_optimizer(straight, optimizer), tmp_path / "optimizer.safetensors")
    expected = steps(straight, optimizer, [2, 3])

    resumed = load_weights(safetensors.load_file(tmp_path / "weights.safetensors"))
    optimizer = tr.make_optimizer(resumed, CONFIG.lr)
    load_optimizer(resumed, optimizer, safetensors.load_file(tmp_path / "optimizer.safetensors"))
    assert steps(resumed, optimizer, [2, 3]) == expected
    for name, weight in save_weights(straight).items():
        assert torch.equal(weight, resumed.get_parameter(name)), name


def test_training_raises_the_reward_of_what_it_favours(model, small):
    batch = tr.collate_generations(sample(small, WORDS[:16], range(16)))
    advantages = torch.tensor([1.0, -1.0]).repeat(8)
    trained = load_weights(save_weights(model))
    optimizer = tr.make_optimizer(trained, CONFIG.lr)
    with torch.no_grad():
        before = tr.token_logprobs(trained, batch)[0].sum(1)
    for seed in range(4):
        stats = tr.train_step(trained, optimizer, batch, advantages, CONFIG, seed=seed)
    assert stats.keys() == {"loss", "clipped", "grad_norm"}
    with torch.no_grad():
        gained = tr.token_logprobs(trained, batch)[0].sum(1) - before
    assert float(gained[::2].mean()) > 0 > float(gained[1::2].mean())
