import time, pytest, torch
from harness import history, make, score, weights
def test_a(folder, colocate):
    t0=time.time()
    t = make(folder, [], **colocate(), learning_rate=0.3, max_steps=3, num_iterations=1)
    print("make", time.time()-t0); t0=time.time()
    t.train(); print("train", time.time()-t0)
    for h in t.state.log_history: print({k:v for k,v in h.items() if 'sampling' in k or k in ('reward','grad_norm','loss') or 'length' in k})
def test_b(folder, colocate):
    t0=time.time()
    t = make(folder, ["vade","mc_grpo"], **colocate(), learning_rate=0.3, max_steps=3)
    print("make", time.time()-t0); t0=time.time()
    t.train(); print("train", time.time()-t0)
    for h in t.state.log_history: print({k:v for k,v in h.items() if 'sampling' in k or k in ('reward','grad_norm','loss') or 'length' in k})
def test_c(folder, colocate):
    t0=time.time()
    t = make(folder, [], **colocate("auto"), learning_rate=0.3, max_steps=3)
    print("make", time.time()-t0); t0=time.time()
    t.train(); print("train", time.time()-t0)
    for h in t.state.log_history: print({k:v for k,v in h.items() if 'sampling' in k or k in ('reward','grad_norm','loss') or 'length' in k})
def test_s(folder, server):
    t0=time.time()
    t = make(folder, ["vade","mc_grpo"], **server, learning_rate=0.3, max_steps=3)
    print("make", time.time()-t0); t0=time.time()
    t.train(); print("train", time.time()-t0)
    for h in t.state.log_history: print({k:v for k,v in h.items() if 'sampling' in k or k in ('reward','grad_norm','loss') or 'length' in k})
