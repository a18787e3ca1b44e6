//! Unresponsive daemons: what the manager reports in their place, and when. Objects are backdated, so that the minute
//! that it waits is nearly over when a test starts.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Event, Node};
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::node_image::{ImageTagStatus, NodeImage};
use kruise_cluster::Cluster;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use crate::etcd::etcd_request;
use crate::jobs::wait_for_event;
use crate::recreate_requests::create;
use crate::test_cluster::{
    WAIT_TIMEOUT, api, create_node, create_pod, merge_status, shared_cluster, wait_until,
};

/// Seconds after which a daemon counts as unresponsive.
const RESPONSE_TIMEOUT: i64 = 60;
/// Seconds by which the tests backdate objects.
const INITIAL_AGE: i64 = 57;

/// Backdates a request in namespace `default` by that many seconds.
fn backdate_request(name: &str, seconds: i64) {
    let key = BASE64_STANDARD.encode(format!(
        "/registry/apps.kruise.io/containerrecreaterequests/default/{name}"
    ));
    let created_at = (Timestamp::now() - SignedDuration::from_secs(seconds))
        .strftime("%Y-%m-%dT%H:%M:%SZ")
        .to_string();
    let start = std::time::Instant::now();
    loop {
        let found = etcd_request(
            shared_cluster().plane.etcd_address(),
            "range",
            &json!({ "key": key }),
        );
        let stored_entry = &found["kvs"][0];
        let stored = BASE64_STANDARD
            .decode(
                stored_entry["value"]
                    .as_str()
                    .unwrap_or_else(|| panic!("{found}")),
            )
            .unwrap();
        let mut object: Value = serde_json::from_slice(&stored).unwrap();
        object["metadata"]["creationTimestamp"] = json!(created_at);
        let put = json!({ "key": key, "value": BASE64_STANDARD.encode(object.to_string()) });
        let same = json!({ "key": key, "target": "MOD", "result": "EQUAL", "mod_revision": stored_entry["mod_revision"] });
        let swapped = etcd_request(
            shared_cluster().plane.etcd_address(),
            "txn",
            &json!({ "compare": [same], "success": [{ "request_put": put }] }),
        );
        if swapped["succeeded"] == true {
            return;
        }
        assert!(
            start.elapsed() < WAIT_TIMEOUT,
            "{name} never stands still: {swapped}"
        );
    }
}

/// Seconds between two timestamps, in the resolution of objects.
fn seconds_between(from: Timestamp, to: Timestamp) -> i64 {
    to.duration_since(from).as_secs()
}

fn is_about_a_minute(waited: i64) -> bool {
    (RESPONSE_TIMEOUT..RESPONSE_TIMEOUT + WAIT_TIMEOUT.as_secs().cast_signed()).contains(&waited)
}

#[tokio::test]
async fn unanswered_request_fails_after_a_minute() {
    let admin = shared_cluster().admin().await;
    let requests: Api<ContainerRecreateRequest> = api(&admin);
    for name in ["looked-at", "silent"] {
        create_pod(&admin, name, &format!("n-{name}"), json!({}), false).await;
        create(&requests, name, name, json!({})).await;
    }
    merge_status(&requests, "looked-at", json!({ "phase": "Pending" })).await;
    backdate_request("looked-at", 10 * RESPONSE_TIMEOUT);
    backdate_request("silent", INITIAL_AGE);
    let ended = wait_until(&requests, "silent", "ended", |r: &ContainerRecreateRequest| {
        r.status.as_ref().is_some_and(|s| s.completion_time.is_some())
    })
    .await;
    let status = ended.status.unwrap();
    assert_eq!(
        (status.phase.as_str(), status.message.as_deref()),
        ("Completed", Some("daemon has not responded for a long time"))
    );
    let waited = seconds_between(
        ended.metadata.creation_timestamp.unwrap().0,
        status.completion_time.unwrap().0,
    );
    assert!(is_about_a_minute(waited), "ended after {waited} s");
    let other = requests.get("looked-at").await.unwrap().status.unwrap();
    assert_eq!(other.completion_time, None, "its daemon has said something");
}

/// Requests an image on the node, backdated; returns the timestamp.
async fn request_image(admin: &Cluster, name: &str) -> Timestamp {
    let images = Api::<NodeImage>::all(admin.client.clone());
    let created = admin.clock.now() - SignedDuration::from_secs(INITIAL_AGE);
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
async fn unready_node_fails_unanswered_tags_after_a_minute() {
    let admin = shared_cluster().admin().await;
    let (images, nodes) = (
        Api::<NodeImage>::all(admin.client.clone()),
        Api::<Node>::all(admin.client.clone()),
    );
    for name in ["lost", "well"] {
        create_node(&admin, name, json!({}), true).await;
        wait_until(&images, name, "there", |_| true).await;
    }
    let unknown_ready = json!([{ "type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "",
        "lastHeartbeatTime": "2020-01-01T00:00:00Z", "lastTransitionTime": "2020-01-01T00:00:00Z" }]);
    merge_status(&nodes, "lost", json!({ "conditions": unknown_ready })).await;
    request_image(&admin, "well").await;
    let created = request_image(&admin, "lost").await;
    let failed = wait_until(&images, "lost", "given up", |i: &NodeImage| tag(i).is_some()).await;
    let status = tag(&failed).unwrap();
    assert_eq!(
        (status.phase.as_str(), status.message.as_deref()),
        ("Failed", Some("node has not responded for a long time"))
    );
    let waited = seconds_between(created, status.completion_time.as_ref().unwrap().0);
    assert!(is_about_a_minute(waited), "given up after {waited} s");
    assert_eq!(
        tag(&images.get("well").await.unwrap()),
        None,
        "a node that is ready is given ten minutes"
    );
    let events = Api::<Event>::namespaced(admin.client.clone(), "default");
    let event = wait_for_event(&events, "lost", "PullImageFailed").await;
    assert_eq!(
        event.message.as_deref(),
        Some("Failed to pull image silence:1 on node lost for node has not responded for a long time")
    );
}
