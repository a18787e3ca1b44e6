//! Daemons that say nothing: what the manager says in their place, and when. Objects are made old, so that the
//! minute that it waits is nearly over when a test begins.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Event, Node};
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::node_image::{ImageTagStatus, NodeImage};
use kruise_cluster::Cluster;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use crate::etcd::etcd;
use crate::jobs::until_event;
use crate::requests::create;
use crate::world::{PATIENCE, api, merge_status, node, pod, until, world};

/// How long a daemon may say nothing, in seconds.
const MINUTE: i64 = 60;
/// How old the tests make what they wait for, in seconds.
const OLD: i64 = 57;

/// Makes a request of namespace `default` that many seconds old.
fn make_old(name: &str, seconds: i64) {
    let key = BASE64_STANDARD.encode(format!(
        "/registry/apps.kruise.io/containerrecreaterequests/default/{name}"
    ));
    let then = (Timestamp::now() - SignedDuration::from_secs(seconds))
        .strftime("%Y-%m-%dT%H:%M:%SZ")
        .to_string();
    let start = std::time::Instant::now();
    loop {
        let found = etcd(world().plane.store(), "range", &json!({ "key": key }));
        let kept = &found["kvs"][0];
        let stored = BASE64_STANDARD
            .decode(kept["value"].as_str().unwrap_or_else(|| panic!("{found}")))
            .unwrap();
        let mut object: Value = serde_json::from_slice(&stored).unwrap();
        object["metadata"]["creationTimestamp"] = json!(then);
        let put = json!({ "key": key, "value": BASE64_STANDARD.encode(object.to_string()) });
        let same =
            json!({ "key": key, "target": "MOD", "result": "EQUAL", "mod_revision": kept["mod_revision"] });
        let swapped = etcd(
            world().plane.store(),
            "txn",
            &json!({ "compare": [same], "success": [{ "request_put": put }] }),
        );
        if swapped["succeeded"] == true {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{name} never stands still: {swapped}");
    }
}

/// The seconds between two moments, as objects have them.
fn seconds(from: Timestamp, to: Timestamp) -> i64 {
    to.duration_since(from).as_secs()
}

fn in_time(waited: i64) -> bool {
    (MINUTE..MINUTE + PATIENCE.as_secs().cast_signed()).contains(&waited)
}

#[tokio::test]
async fn a_request_that_no_daemon_looks_at_fails_after_a_minute() {
    let admin = world().admin().await;
    let requests: Api<ContainerRecreateRequest> = api(&admin);
    for name in ["looked-at", "silent"] {
        pod(&admin, name, &format!("n-{name}"), json!({}), false).await;
        create(&requests, name, name, json!({})).await;
    }
    merge_status(&requests, "looked-at", json!({ "phase": "Pending" })).await;
    make_old("looked-at", 10 * MINUTE);
    make_old("silent", OLD);
    let ended = until(&requests, "silent", "ended", |r: &ContainerRecreateRequest| {
        r.status.as_ref().is_some_and(|s| s.completion_time.is_some())
    })
    .await;
    let status = ended.status.unwrap();
    assert_eq!(
        (status.phase.as_str(), status.message.as_deref()),
        ("Completed", Some("daemon has not responded for a long time"))
    );
    let waited = seconds(
        ended.metadata.creation_timestamp.unwrap().0,
        status.completion_time.unwrap().0,
    );
    assert!(in_time(waited), "ended after {waited} s");
    let other = requests.get("looked-at").await.unwrap().status.unwrap();
    assert_eq!(other.completion_time, None, "its daemon has said something");
}

/// Asks the node for an image, some time ago; when that was.
async fn ask(admin: &Cluster, name: &str) -> Timestamp {
    let images = Api::<NodeImage>::all(admin.client.clone());
    let created = admin.clock.now() - SignedDuration::from_secs(OLD);
    let text = created.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let tag = json!({ "tag": "1", "createdAt": text, "version": 0,
        "pullPolicy": { "ttlSecondsAfterFinished": 86400 } });
    let patch = json!({ "spec": { "images": { "silence": { "tags": [tag] } } } });
    images
        .patch(name, &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();
    text.parse().unwrap()
}

fn tag(image: &NodeImage) -> Option<&ImageTagStatus> {
    image.status.as_ref()?.image_statuses.get("silence")?.tags.first()
}

#[tokio::test]
async fn a_node_that_is_not_ready_and_says_nothing_fails_its_tags_after_a_minute() {
    let admin = world().admin().await;
    let (images, nodes) = (
        Api::<NodeImage>::all(admin.client.clone()),
        Api::<Node>::all(admin.client.clone()),
    );
    for name in ["lost", "well"] {
        node(&admin, name, json!({}), true).await;
        until(&images, name, "there", |_| true).await;
    }
    let lost = json!([{ "type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "",
        "lastHeartbeatTime": "2020-01-01T00:00:00Z", "lastTransitionTime": "2020-01-01T00:00:00Z" }]);
    merge_status(&nodes, "lost", json!({ "conditions": lost })).await;
    ask(&admin, "well").await;
    let created = ask(&admin, "lost").await;
    let failed = until(&images, "lost", "given up", |i: &NodeImage| tag(i).is_some()).await;
    let status = tag(&failed).unwrap();
    assert_eq!(
        (status.phase.as_str(), status.message.as_deref()),
        ("Failed", Some("node has not responded for a long time"))
    );
    let waited = seconds(created, status.completion_time.as_ref().unwrap().0);
    assert!(in_time(waited), "given up after {waited} s");
    assert_eq!(
        tag(&images.get("well").await.unwrap()),
        None,
        "a node that is ready is given ten minutes"
    );
    let events = Api::<Event>::namespaced(admin.client.clone(), "default");
    let event = until_event(&events, "lost", "PullImageFailed").await;
    assert_eq!(
        event.message.as_deref(),
        Some("Failed to pull image silence:1 on node lost for node has not responded for a long time")
    );
}
