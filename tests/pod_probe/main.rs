//! Probes of a NodePodProbe on a real node: kubelet, containerd, and the daemon with its own service account behind the
//! fence. No manager runs: the tests write the NodePodProbe.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../node_recreate/fixture/mod.rs"]
#[allow(dead_code, unused_imports)]
mod fixture;

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::ops::Deref;
use std::time::Instant;

use fixture::{DaemonCluster, TestNamespace, exclusive_cluster};
use k8s_openapi::api::core::v1::{Event, Pod};
use kruise_api::node_pod_probe::{NodePodProbe, ProbeState};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use support::{connect, programs, waits};
use testbed::cluster::NODE_NAME;

/// A container that serves `/www` at port 8080 once there is no `/log/hold`, until `/log/stop` exists. It creates
/// `/log/healthy` when it serves.
fn server() -> Value {
    let script = "rm -f /log/stop; while [ -e /log/hold ]; do sleep 0.2; done; \
        mkdir -p /www; echo up > /www/ok; httpd -p 8080 -h /www; touch /log/healthy; \
        while [ ! -e /log/stop ]; do sleep 0.2; done";
    json!({"name": "app", "image": "busybox:1.36", "command": ["sh", "-c", script]})
}

fn probe(name: &str, handler: Value) -> Value {
    // A command takes longer than a second on a busy machine.
    let mut probe = json!({"periodSeconds": 1, "initialDelaySeconds": 1, "timeoutSeconds": 20});
    json_patch::merge(&mut probe, &handler);
    json!({"name": format!("marker#{name}"), "containerName": "app", "probe": probe})
}

fn entry(pod: &Pod, ip: &str, probes: Value) -> Value {
    json!({"name": pod.name_any(), "namespace": pod.namespace(), "uid": pod.uid(), "IP": ip, "probes": probes})
}

fn pod_ip(pod: &Pod) -> String {
    pod.status.clone().unwrap().pod_ip.unwrap()
}

/// States and messages of a Pod's probes by their names without the marker's.
type States = BTreeMap<String, (ProbeState, String)>;

fn states(object: &NodePodProbe, uid: &str) -> States {
    let status = object.status.clone().unwrap_or_default();
    let pod = status.pod_probe_statuses.into_iter().find(|pod| pod.uid == uid);
    let states = pod.into_iter().flat_map(|pod| pod.probe_states);
    states
        .map(|state| (state.name.replace("marker#", ""), (state.state, state.message)))
        .collect()
}

/// The NodePodProbe of the node; the tests use it one after the other.
trait NodePodProbeOps {
    fn node_pod_probes(&self) -> Api<NodePodProbe>;
    /// Replaces what is to be probed.
    async fn write_probes(&self, pod_probes: Value);
    /// Waits until the states of a Pod are as `predicate` wants them.
    async fn wait_states(&self, pod: &Pod, what: &str, predicate: impl Fn(&States) -> bool) -> States;
    /// Reasons and messages of the events on a Pod about its probes.
    async fn probe_events(&self, pod: &Pod) -> Vec<(String, String)>;
    /// Successful writes of the daemon to the NodePodProbe.
    fn status_writes(&self) -> usize;
}

impl<G: Deref<Target = DaemonCluster>> NodePodProbeOps for TestNamespace<G> {
    fn node_pod_probes(&self) -> Api<NodePodProbe> {
        Api::all(self.client.clone())
    }

    async fn write_probes(&self, pod_probes: Value) {
        let api = self.node_pod_probes();
        let object = json!({"apiVersion": "apps.kruise.io/v1alpha1", "kind": "NodePodProbe",
            "metadata": {"name": NODE_NAME}, "spec": {"podProbes": pod_probes}});
        if api.get_opt(NODE_NAME).await.unwrap().is_none() {
            let object = serde_json::from_value(object).unwrap();
            api.create(&PostParams::default(), &object).await.unwrap();
        } else {
            let patch = Patch::Merge(object);
            api.patch(NODE_NAME, &PatchParams::default(), &patch)
                .await
                .unwrap();
        }
    }

    async fn wait_states(&self, pod: &Pod, what: &str, predicate: impl Fn(&States) -> bool) -> States {
        let uid = pod.uid().unwrap();
        let logs = || {
            let status = self
                .cluster
                .node
                .plane
                .kubectl(&["get", "nodepodprobes", "-o=yaml"]);
            format!("{}\n{}", status.unwrap_or_default(), self.cluster.log_tails())
        };
        waits::poll_until(what, &logs, || async {
            let found = self.node_pod_probes().get(NODE_NAME).await.unwrap();
            Some(states(&found, &uid)).filter(&predicate)
        })
        .await
    }

    async fn probe_events(&self, pod: &Pod) -> Vec<(String, String)> {
        let events = self.api::<Event>().list(&ListParams::default()).await.unwrap();
        let of_pod = events
            .items
            .into_iter()
            .filter(|event| event.involved_object.uid == pod.uid());
        let of_probes = of_pod.filter(|event| {
            event
                .reason
                .as_deref()
                .is_some_and(|r| r.starts_with("KruiseProbe"))
        });
        of_probes
            .map(|event| (event.reason.unwrap(), event.message.unwrap_or_default()))
            .collect()
    }

    fn status_writes(&self) -> usize {
        let writes = self.cluster.node.plane.audited_writes().unwrap();
        let ours = writes.iter().filter(|write| {
            write["user"]["username"] == "system:serviceaccount:kruise-system:kruise-daemon"
                && write["objectRef"]["resource"] == "nodepodprobes"
        });
        ours.inspect(|write| assert_eq!(write["responseStatus"]["code"], 200, "{write:#}"))
            .count()
    }
}

fn succeeded(message: &str) -> (ProbeState, String) {
    (ProbeState::Succeeded, message.to_owned())
}

fn failed(message: &str) -> (ProbeState, String) {
    (ProbeState::Failed, message.to_owned())
}

#[tokio::test]
async fn every_handler_reports_and_follows_its_container() {
    let test = exclusive_cluster().await;
    let pod = test.create_pod("web", json!([server()]), json!({})).await;
    test.wait_for_file("healthy").await;
    let writes_before = test.status_writes();
    let started = Instant::now();
    let ip = pod_ip(&pod);
    let probes = json!([
        probe(
            "exec",
            json!({"exec": {"command": ["sh", "-c", "cat /log/healthy && echo fine || exit 3"]}})
        ),
        probe(
            "http",
            json!({"httpGet": {"path": "/ok", "port": 8080, "scheme": "HTTP"}})
        ),
        probe("missing", json!({"httpGet": {"path": "/missing", "port": 8080}})),
        probe("tcp", json!({"tcpSocket": {"port": 8080}})),
        probe("closed", json!({"tcpSocket": {"port": 9}})),
        probe("grpc", json!({"grpc": {"port": 8080, "service": ""}})),
        probe("port", json!({"tcpSocket": {"port": "web"}})),
    ]);
    // The Pod is not this one.
    let mut other = entry(
        &pod,
        &ip,
        json!([probe("tcp", json!({"tcpSocket": {"port": 8080}}))]),
    );
    other["uid"] = json!("00000000-0000-0000-0000-000000000000");
    test.write_probes(json!([other, entry(&pod, &ip, probes)])).await;
    let seen = test
        .wait_states(&pod, "seven results", |states| states.len() == 7)
        .await;
    assert_eq!(seen["exec"], succeeded("fine\n"));
    assert_eq!(seen["http"], succeeded("up\n"));
    assert_eq!(seen["missing"], failed("HTTP probe failed with statuscode: 404"));
    assert_eq!(seen["tcp"], succeeded(""));
    let (state, message) = &seen["closed"];
    assert_eq!(*state, ProbeState::Failed);
    assert!(message.starts_with(&format!("dial tcp {ip}:9: ")), "{message}");
    assert_eq!(seen["grpc"].0, ProbeState::Failed);
    let unusable = "tcpSocket.port is \"web\", which is no port number".to_owned();
    assert_eq!(seen["port"], (ProbeState::Unknown, unusable));

    // A file goes and comes.
    std::fs::remove_file(test.log_dir.join("healthy")).unwrap();
    let seen = test
        .wait_states(&pod, "exec fails", |states| {
            states["exec"].0 == ProbeState::Failed
        })
        .await;
    assert!(seen["exec"].1.contains("/log/healthy"), "{seen:?}");

    // The container ends; kubelet starts it again, which may take less time than a write of the status.
    std::fs::write(test.log_dir.join("hold"), "").unwrap();
    std::fs::write(test.log_dir.join("stop"), "").unwrap();
    test.wait_states(&pod, "all fail or are unknown", |states| {
        states.values().all(|(state, _)| *state != ProbeState::Succeeded)
    })
    .await;
    std::fs::remove_file(test.log_dir.join("hold")).unwrap();
    test.wait_states(&pod, "succeeds again", |states| {
        ["exec", "http", "tcp"]
            .iter()
            .all(|name| states[*name].0 == ProbeState::Succeeded)
    })
    .await;

    let logs = || {
        let events = test
            .cluster
            .node
            .plane
            .kubectl(&["get", "events", "--all-namespaces"]);
        format!("{}\n{}", events.unwrap_or_default(), test.cluster.log_tails())
    };
    let events = waits::poll_until("an event of the first failure", &logs, || async {
        let events = test.probe_events(&pod).await;
        let is_failure = |(_, message): &(String, String)| message.contains("/log/healthy");
        events.iter().any(is_failure).then_some(events)
    });
    let events = events.await;
    assert!(
        events.contains(&("KruiseProbeSucceeded".to_owned(), "up\n".to_owned())),
        "{events:?}"
    );
    // Unknown has no event.
    assert!(
        !events
            .iter()
            .any(|(_, message)| message.contains("no port number")),
        "{events:?}"
    );
    let object = test.node_pod_probes().get(NODE_NAME).await.unwrap();
    let uids: Vec<String> = object
        .status
        .unwrap()
        .pod_probe_statuses
        .into_iter()
        .map(|pod| pod.uid)
        .collect();
    assert_eq!(uids, [pod.uid().unwrap()]);

    // Removed probes leave the status.
    test.write_probes(json!([])).await;
    test.wait_states(&pod, "no results", States::is_empty).await;
    // A write a second at the most; without a limit there were one for each result.
    let writes = u64::try_from(test.status_writes() - writes_before).unwrap();
    let limit = started.elapsed().as_secs() + 2;
    assert!(
        (4..=limit).contains(&writes),
        "{writes} writes of the status in {limit} s"
    );
}

/// The object may name any host and any address; only the Pod's own is probed.
#[tokio::test]
async fn no_other_host_is_probed() {
    let test = exclusive_cluster().await;
    let pod = test.create_pod("web", json!([server()]), json!({})).await;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let probes = json!([
        probe(
            "http",
            json!({"httpGet": {"host": "127.0.0.1", "path": "/", "port": port}})
        ),
        probe("tcp", json!({"tcpSocket": {"host": "127.0.0.1", "port": port}})),
    ]);
    for ip in ["127.0.0.1", ""] {
        test.write_probes(json!([entry(&pod, ip, probes.clone())])).await;
        let seen = test.wait_states(&pod, "both fail", |states| {
            states.len() == 2 && states.values().all(|(state, _)| *state == ProbeState::Failed)
        });
        let seen = seen.await;
        let address = format!("{}:{port}", pod_ip(&pod));
        assert!(
            seen.values().all(|(_, message)| message.contains(&address)),
            "{seen:?}"
        );
    }
    assert!(listener.accept().is_err(), "the daemon has connected to the node");
    test.node_pod_probes()
        .delete(NODE_NAME, &DeleteParams::default())
        .await
        .unwrap();
}

/// States stay as they are while a new daemon begins.
#[tokio::test]
async fn restarted_daemon_continues_with_the_stored_results() {
    let mut test = exclusive_cluster().await;
    let pod = test.create_pod("web", json!([server()]), json!({})).await;
    // The slow probe is not repeated.
    test.wait_for_file("healthy").await;
    let slow = json!({"tcpSocket": {"port": 8080}, "periodSeconds": 3600});
    let fast = json!({"tcpSocket": {"port": 8080}});
    test.write_probes(json!([entry(
        &pod,
        &pod_ip(&pod),
        json!([probe("slow", slow.clone()), probe("fast", fast)])
    )]))
    .await;
    test.wait_states(&pod, "both succeed", |states| {
        states.len() == 2 && states.values().all(|(state, _)| *state == ProbeState::Succeeded)
    })
    .await;
    test.cluster.daemon.stop().unwrap();
    let writes = test.status_writes();
    let changed = json!([
        probe("slow", slow),
        probe("fast", json!({"tcpSocket": {"port": 9}}))
    ]);
    test.write_probes(json!([entry(&pod, &pod_ip(&pod), changed)]))
        .await;
    test.cluster.daemon.start().unwrap();
    let seen = test
        .wait_states(&pod, "the other fails", |states| {
            states["fast"].0 == ProbeState::Failed
        })
        .await;
    assert_eq!(seen["slow"].0, ProbeState::Succeeded);
    assert_eq!(test.status_writes() - writes, 1, "only the failure was news");
    test.node_pod_probes()
        .delete(NODE_NAME, &DeleteParams::default())
        .await
        .unwrap();
}
