#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use crate::panicking::PanickingRuntime;

#[test]
fn default_candidates_follow_upstreams_order() {
    let options = DiscoveryOptions {
        root: "/hostvarrun".into(),
        socket_file: None,
    };
    let list = options.candidates();
    assert_eq!(list.len(), 7);
    assert_eq!(list[0], Path::new("/hostvarrun/containerd.sock"));
    assert_eq!(list[3], Path::new("/hostvarrun/crio/crio.sock"));
    assert_eq!(list[6], Path::new("/hostvarrun/k3s/containerd/containerd.sock"));
}

#[test]
fn socket_file_option_is_the_only_candidate() {
    let candidates = |file: &str| {
        DiscoveryOptions {
            root: "/hostvarrun".into(),
            socket_file: Some(file.into()),
        }
        .candidates()
    };
    assert_eq!(candidates("x/y.sock"), [Path::new("/hostvarrun/x/y.sock")]);
    assert_eq!(candidates("/run/y.sock"), [Path::new("/run/y.sock")]);
    assert_eq!(candidates("unix:///run/y.sock"), [Path::new("/run/y.sock")]);
}

#[test]
fn no_runtime_reason_lists_missing_sockets_once() {
    let mut slots: Vec<_> = ["/a", "/b", "/c"]
        .map(|s| SocketSlot::new(s.into()).health)
        .into();
    slots[0].present = true;
    slots[0].message = "runtime at /a did not answer".to_owned();
    assert_eq!(
        no_runtime_reason(&slots),
        "runtime at /a did not answer; no socket at /b, /c"
    );
}

/// Before that, a runtime may be there.
#[tokio::test]
async fn every_socket_is_checked_once_all_were_probed() {
    let dir = tempfile::tempdir().unwrap();
    let runtimes = Runtimes::new(&DiscoveryOptions {
        root: dir.path().to_owned(),
        socket_file: None,
    });
    std::fs::write(dir.path().join("containerd.sock"), "").unwrap();
    assert!(!runtimes.health().iter().any(|socket| socket.checked));
    runtimes.probe_all().await;
    assert!(runtimes.health().iter().all(|socket| socket.checked));
}

#[tokio::test]
async fn missing_reason_describes_the_path() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("f.sock");
    assert!(
        missing_reason(&file)
            .await
            .unwrap()
            .contains("there is no socket")
    );
    std::fs::write(&file, "").unwrap();
    assert!(missing_reason(&file).await.unwrap().contains("is not a socket"));
}

/// Images that another runtime pulls are of no use to kubelet, not even while its own does not answer.
#[test]
fn runtime_of_kubelet_is_preferred_even_while_it_does_not_answer() {
    let runtimes = Runtimes::from_runtime(PanickingRuntime("containerd"));
    let name = || runtimes.preferred().unwrap().name().to_owned();
    let docker = |healthy| {
        let mut slot = SocketSlot::new("/run/cri-dockerd.sock".into());
        slot.runtime = Some(Arc::new(PanickingRuntime("docker")));
        slot.health.healthy = healthy;
        slot
    };
    runtimes.shared.slots.write().unwrap().push(docker(true));
    assert_eq!(name(), "containerd", "no Pod has shown it yet");
    runtimes.set_kubelet_runtime("docker");
    assert_eq!(name(), "docker");
    runtimes.shared.slots.write().unwrap()[1] = docker(false);
    assert_eq!(name(), "docker");
    runtimes.set_kubelet_runtime("cri-o");
    assert_eq!(name(), "containerd", "it has no socket here");
}
