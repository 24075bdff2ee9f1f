//! Requests outside of sessions: tools, members and deletions.

mod harness;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use harness::data::Disk;
use harness::meta::Fake;
use harness::{Net, Transport, soon, until};
use tokio::runtime::Handle;
use torchfs_client::{Identity, Member, MemberConfig, Peers, Progress, Tool, ToolConfig};
use torchfs_proto::msg::meta::Heartbeat;
use torchfs_proto::{BlockId, ClusterId, Code, IdRange, ServerId, SessionId};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tool_finds_the_leader_and_hears_of_progress() {
    for transport in [Transport::Local, Transport::Tcp] {
        let (net, follower, leader) = (Net::default(), Fake::new(), Fake::new());
        follower.set(|state| state.follower = true);
        let addrs = [net.add(transport, follower).await, net.add(transport, leader).await];
        let tool = Tool::new(&addrs, Arc::new(net), ToolConfig::default());
        assert_eq!(soon("an answer", tool.collect()).await, Ok((4, 5)));
        let mut heard = Vec::new();
        let all = tool.check(|progress, problems| heard.push((progress.done, problems.to_vec())));
        assert_eq!(soon("a check", all).await, Ok(Progress { done: 30, total: 30 }));
        let problem = |n: usize| vec![format!("problem {n}")];
        assert_eq!(heard, [(10, problem(0)), (20, problem(1)), (30, problem(2))]);
        soon("an answer", tool.evict(SessionId(1))).await.expect("evicted");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tool_that_reaches_nobody_says_whom_it_tried() {
    let config = ToolConfig { timeout: Duration::from_millis(300), ..ToolConfig::default() };
    // Nobody listens on port 1.
    let tool = Tool::new(&["127.0.0.1:1".into()], Arc::new(Net::default()), config);
    let fault = soon("a fault", tool.status()).await.expect_err("nobody is there");
    assert!(fault.what.contains("127.0.0.1:1"), "{fault}");
    let config = ToolConfig { unreachable: Duration::from_millis(300), ..ToolConfig::default() };
    let tool = Tool::new(&["127.0.0.1:1".into()], Arc::new(Net::default()), config);
    soon("a fault before the timeout", tool.status()).await.expect_err("nobody is there");
    let nowhere = Tool::new(&[], Arc::new(Net::default()), ToolConfig::default());
    assert_eq!(nowhere.status().await.expect_err("no address").code, Code::Invalid);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_learns_who_it_is_reports_so_and_says_goodbye() {
    let (net, fake) = (Net::default(), Fake::new());
    let addr = net.add(Transport::Local, fake.clone()).await;
    let config = MemberConfig { every: Duration::from_millis(1), ..MemberConfig::default() };
    let figures = Arc::new(|| Heartbeat { store: 5, addr: "here:1".into(), ..Heartbeat::default() });
    let member = Member::start(&[addr], &net, config, &Handle::current(), figures);
    let identity = soon("an identity", member.identity()).await;
    assert_eq!(identity, Some(Identity { server: ServerId(3), cluster: ClusterId(9) }));
    until("it reports its number", || fake.state.lock().beats.len() > 2).await;
    soon("a goodbye", member.leave()).await.expect("told");
    let state = fake.state.lock();
    assert_eq!((state.beats[0].server, state.beats[0].store), (ServerId(0), 5));
    let last = state.beats.last().expect("some");
    assert_eq!((last.server, last.cluster, last.leaving), (ServerId(3), ClusterId(9), true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deletions_reach_their_server_and_pieces_are_listed_in_pages() {
    let (net, disk) = (Net::default(), Disk::new());
    let addr = net.add(Transport::Tcp, disk.clone()).await;
    let id = |counter| BlockId { incarnation: 1, counter };
    disk.pieces.lock().extend((0..10).map(|counter| ((id(counter), 0), (Vec::new(), Bytes::new()))));
    let peers = Peers::new(Arc::new(net.clone()), ToolConfig::default());
    soon("a deletion", peers.delete(&addr, &[id(0), id(1)])).await.expect("deleted");
    let range = IdRange { first: id(2), count: 4 };
    soon("a purge", peers.purge(&addr, range, vec![id(3)])).await.expect("purged");
    let tool = Tool::new(&[], Arc::new(net), ToolConfig::default());
    let (first, end) = soon("a page", tool.list_pieces(&addr, None, 3)).await.expect("listed");
    assert_eq!(first.iter().map(|piece| piece.block.counter).collect::<Vec<_>>(), [3, 6, 7]);
    assert!(!end);
    let (rest, end) = soon("a page", tool.list_pieces(&addr, Some((id(7), 0)), 3)).await.expect("listed");
    assert_eq!(rest.iter().map(|piece| piece.block.counter).collect::<Vec<_>>(), [8, 9]);
    assert!(end);
}
