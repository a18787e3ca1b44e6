//! What a rollout depends on goes away in its midst: the API server, the Lease, admission.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::fresh_image;
use crate::manager::Manager;
use crate::pods::{container, identities, runs, state, text};
use crate::programs::manager;
use crate::workloads::{Bed, Space, alone};

/// Waits until a Pod of `web` is being updated.
async fn amid<G: std::ops::Deref<Target = Bed>>(space: &Space<G>) {
    space
        .until_pods("web", "one is being updated", |pods| {
            pods.iter().any(|pod| state(pod) == "Updating")
        })
        .await;
}

#[tokio::test]
async fn a_rollout_goes_on_when_the_api_server_is_back() {
    let mut space = alone().await;
    let before = space.settled_set("web", json!({ "replicas": 3 })).await;
    let witness = space.witness("web").await;
    space.image("web", "kruise-test/term:2").await;
    amid(&space).await;
    space.bed.node.plane.apiserver.restart().unwrap();
    space.settled("web").await;
    let last = fresh_image(&space, "back");
    space.image("web", &last).await;
    amid(&space).await;
    space.bed.node.plane.apiserver.kill().unwrap();
    // Longer than a Lease lasts.
    tokio::time::sleep(Duration::from_secs(6)).await;
    space.bed.node.plane.apiserver.start().unwrap();
    space.settled("web").await;
    let pods = space.pods_of("web").await;
    assert_eq!(identities(pods.values()), before);
    for pod in pods.values() {
        assert!(runs(pod, &last), "{pod}");
        assert_eq!(
            container(pod, "app").restarts,
            2,
            "one restart for each update: {pod}"
        );
    }
    let seen = witness.seen();
    assert!(seen.least_serving >= 2 && seen.most <= 3, "{seen:#?}");
}

/// How the API server's audit log calls the token in a kubeconfig file.
fn credential(manager: &Manager) -> String {
    let file: Value = serde_json::from_slice(&std::fs::read(&manager.kubeconfig).unwrap()).unwrap();
    let token = text(&file["users"][0]["user"]["token"]);
    let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1).unwrap()).unwrap();
    let claims: Value = serde_json::from_slice(&claims).unwrap();
    format!("JTI={}", text(&claims["jti"]))
}

/// The manager's writes since then: time, verb, resource and name.
fn writes(space: &Space<impl std::ops::Deref<Target = Bed>>, by: &str, since: Timestamp) -> Vec<String> {
    let all = space.bed.node.plane.writes().unwrap();
    let mine = |write: &&Value| {
        let received: Timestamp = text(&write["requestReceivedTimestamp"]).parse().unwrap();
        write["user"]["extra"]["authentication.kubernetes.io/credential-id"][0] == by && received >= since
    };
    let told = |write: &Value| {
        let object = &write["objectRef"];
        format!(
            "{} {} {}/{}",
            write["requestReceivedTimestamp"], write["verb"], object["resource"], object["name"]
        )
    };
    all.iter().filter(mine).map(told).collect()
}

/// Many Pods for which there is no node: they are made as fast as can be, and cost nothing.
async fn flood<G: std::ops::Deref<Target = Bed>>(space: &Space<G>, name: &str, pods: i32) {
    let nowhere = json!({ "spec": { "nodeSelector": { "no": "node" } } });
    space
        .set(name, json!({ "replicas": pods, "template": nowhere }))
        .await;
}

#[tokio::test]
async fn a_leader_that_was_stopped_and_lost_the_lease_writes_nothing_more() {
    let space = alone().await;
    let mut other = manager(&space.bed.node, "kruise-manager-2", 1);
    other.start().unwrap();
    other.until_it_says("standing by");
    let (first, second) = (credential(&space.bed.manager), credential(&other));
    let begin = Timestamp::now();
    let before = space.settled_set("web", json!({ "replicas": 3 })).await;
    let witness = space.witness("web").await;
    space.image("web", "kruise-test/term:2").await;
    amid(&space).await;
    // In the midst of many writes, whose answers it finds when it goes on.
    flood(&space, "many", 200).await;
    space
        .until_pods("many", "some of them", |pods| pods.len() >= 20)
        .await;
    space.bed.manager.freeze().unwrap();
    other.until_it_says("leading");
    space.settled("web").await;
    space
        .until_pods("many", "all of them", |pods| pods.len() >= 200)
        .await;
    // There is work when it wakes up.
    space.image("web", &fresh_image(&space, "woken")).await;
    space.edit("many", json!({ "spec": { "replicas": 180 } })).await;
    amid(&space).await;
    let woken = Timestamp::now();
    space.bed.manager.thaw().unwrap();
    space.bed.manager.until_it_says("standing by");
    space.settled("web").await;
    let count = |pods: &[&Value]| pods.len() == 180;
    space.until_pods("many", "as many as wanted", count).await;

    assert!(
        !writes(&space, &first, begin).is_empty(),
        "its writes are not told from others'"
    );
    assert!(!writes(&space, &second, woken).is_empty(), "nobody worked");
    assert_eq!(writes(&space, &first, woken), Vec::<String>::new());
    let pods = space.pods_of("web").await;
    assert_eq!(identities(pods.values()), before);
    assert!(
        pods.values().all(|pod| container(pod, "app").restarts == 2),
        "{pods:#?}"
    );
    let seen = witness.seen();
    assert!(seen.least_serving >= 2 && seen.most <= 3, "{seen:#?}");
    other.stop().unwrap();
    space.bed.manager.until_it_says("leading");
}

#[tokio::test]
async fn what_is_written_while_admission_is_away_is_rolled_out_once() {
    let mut space = alone().await;
    let before = space.settled_set("web", json!({ "replicas": 2 })).await;
    space.bed.manager.stop().unwrap();
    space.image("web", "kruise-test/term:2").await;
    space.set("born", json!({ "replicas": 1 })).await;
    space.bed.manager.start().unwrap();
    let (web, born) = (space.settled("web").await, space.settled("born").await);
    let pods = space.pods_of("web").await;
    assert_eq!(identities(pods.values()), before);
    assert!(
        pods.values().all(|pod| runs(pod, "kruise-test/term:2")),
        "{pods:#?}"
    );
    // Admission fills in its defaults at the next write, which is no new template.
    let ids = || async {
        let (web, born) = (space.pods_of("web").await, space.pods_of("born").await);
        web.into_values()
            .chain(born.into_values())
            .map(|pod| container(&pod, "app").id)
            .collect::<Vec<_>>()
    };
    let running = ids().await;
    for (name, told) in [("web", web), ("born", born)] {
        space.edit(name, json!({ "metadata": { "annotations": { "example.com/note": "x" } }, "spec": { "minReadySeconds": 1 } })).await;
        let after = space.settled(name).await;
        assert_eq!(after.update_revision, told.update_revision, "{name}");
    }
    assert_eq!(ids().await, running);
    let revisions = space
        .api("apps", "v1", "ControllerRevision")
        .list(&Default::default())
        .await
        .unwrap();
    assert_eq!(revisions.items.len(), 3, "two of one, one of the other");
}
