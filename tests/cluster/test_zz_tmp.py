from pathlib import Path
import pytest
from . import test_resume as t
from .in_process import *
pytestmark = pytest.mark.asyncio(loop_scope="module")

async def run(prepare, folder, deaths, evict):
    async with running(local_config(), folder) as stack, t.Client(stack.address, "key-a") as client:
        request = await prepare(stack, client)
        await t.start_decode(stack)
        seen=[]
        async for r in client.generate(request):
            seen.append(r)
            if r.HasField("delta") and len(tokens_of(seen)) in deaths:
                if evict: t.forget_windows(stack)
                await stack.kill_decoding()
        ev=[(r.delta.token.id, r.delta.token.logprob) for r in seen if r.HasField("delta")]
        return ev, seen[0].started.sources, finished_of(seen).retries

@pytest.mark.parametrize("more", [4, 40])
async def test_lost(tmp_path, more):
    p=t.second_turn(70, more)
    a,s,_=await run(p, tmp_path/"a", (), False)
    b,s2,r=await run(p, tmp_path/"b", (20,), True)
    print(s.state_restored, s2.state_restored, r)
    print("TOKENS", [x[0] for x in a]==[x[0] for x in b], "LOGPROBS first diff", next((i for i,(x,y) in enumerate(zip(a,b)) if x!=y), None))
