//! The daemon's pulls with requests, ends, failures and restarts at difficult moments.

use std::collections::VecDeque;
use std::time::Duration;

use kruise_api::node_image::ImagePullPhase;
use serde_json::json;

use crate::daemon::Daemon;
use crate::pull_node::{PullNode, tag};
use support::fault_cri::FaultCri;

pub struct DaemonFixture {
    pub dir: tempfile::TempDir,
    pub node: PullNode,
    pub cri: FaultCri,
}

impl DaemonFixture {
    pub async fn start(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let node = PullNode::on_shared_plane(name).await;
        let cri = FaultCri::start(&dir.path().join("cri.sock"));
        Self { dir, node, cri }
    }

    pub fn start_daemon(&self, extra_args: &[&str]) -> Daemon {
        Daemon::start(
            &self.node,
            &self.dir.path().join("cri.sock"),
            self.dir.path(),
            extra_args,
        )
    }
}

const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

#[tokio::test]
async fn tags_and_digests_are_pulled_and_reported() {
    let fixture = DaemonFixture::start("plain").await;
    let daemon = fixture.start_daemon(&[]);
    fixture
        .node
        .create_node_image(
            json!({"r.test/app": {"tags": [tag("v1", json!({})), tag(DIGEST, json!({}))],
        "sandboxConfig": {"labels": {"l": "1"}, "annotations": {"a": "2"}}}}),
        )
        .await;
    let status = fixture.node.wait_tag_complete("r.test/app", "v1").await;
    assert_eq!(
        (status.phase, status.progress, status.message),
        (ImagePullPhase::Succeeded, 100, None)
    );
    assert!(status.image_id.unwrap().starts_with("r.test/app@sha256:"));
    assert!(status.start_time.unwrap().0 <= status.completion_time.unwrap().0);
    let status = fixture.node.wait_tag_complete("r.test/app", DIGEST).await;
    assert_eq!(status.phase, ImagePullPhase::Succeeded);
    let node = fixture
        .node
        .wait_node_image("all counted", |n| {
            n.status.as_ref().is_some_and(|s| s.succeeded == 2)
        })
        .await;
    let counted = node.status.unwrap();
    assert_eq!(
        (counted.desired, counted.failed, counted.pulling, counted.waiting),
        (2, 0, 0, 0)
    );

    assert_pull_requests(&fixture);
    let event_message = fixture
        .node
        .wait_event(&fixture.node.uid().await, "PullImageSucceed")
        .await;
    assert!(event_message.starts_with("Image r.test/app"), "{event_message}");
    assert!(
        daemon.stop().await < Duration::from_secs(5),
        "TERM must end it soon"
    );
}

fn assert_pull_requests(fixture: &DaemonFixture) {
    let pulls = fixture.cri.state().pulls.clone();
    let mut names: Vec<_> = pulls.iter().map(|p| p.image.clone().unwrap().image).collect();
    names.sort();
    assert_eq!(
        names,
        ["r.test/app:v1".to_owned(), format!("r.test/app@{DIGEST}")]
    );
    let sandbox = pulls[0].sandbox_config.clone().unwrap();
    assert_eq!(
        (sandbox.labels["l"].as_str(), sandbox.annotations["a"].as_str()),
        ("1", "2")
    );
    assert_eq!(
        sandbox.annotations["apps.kruise.io/pulling-image-by"],
        "kruise-daemon"
    );
}

#[tokio::test]
async fn present_image_is_not_pulled() {
    let fixture = DaemonFixture::start("present").await;
    fixture.cri.state().add_image("docker.io/library/nginx:1");
    let daemon = fixture.start_daemon(&[]);
    daemon
        .wait_for_response("/readyz", |status, _| status == 200)
        .await;
    fixture
        .node
        .create_node_image(json!({"nginx": {"tags": [tag("1", json!({}))]}}))
        .await;
    fixture.node.wait_tag_complete("nginx", "1").await;
    assert_eq!(fixture.cri.calls("PullImage"), 0);
    // One, unless the machine is so busy that the start was reported in a write of its own.
    daemon.wait_for_status_writes(1..=2).await;

    fixture
        .node
        .patch_images(
            json!({"nginx": {"tags": [tag("1", json!({"version": 1, "imagePullPolicy": "Always"}))]}}),
        )
        .await;
    fixture
        .node
        .wait_tag("nginx", "1", "pulled again", |t| {
            t.version == 1 && t.completion_time.is_some()
        })
        .await;
    assert_eq!(fixture.cri.calls("PullImage"), 1, "Always pulls what is present");
    daemon.wait_for_status_writes(2..=4).await;
}

#[tokio::test]
async fn max_workers_limits_pulls_and_jobs_share_fairly() {
    let fixture = DaemonFixture::start("fair").await;
    fixture.cri.state().pull_delay = Duration::from_millis(300);
    let owner = |uid: &str| json!({"ownerReferences": [{"kind": "ImagePullJob", "namespace": uid, "name": uid, "uid": uid}]});
    let mut tags: Vec<_> = (0..9)
        .map(|n| tag(&format!("large{n}"), owner("large")))
        .collect();
    tags.push(tag("small", owner("small")));
    fixture
        .node
        .create_node_image(json!({"r.test/a": {"tags": tags}}))
        .await;
    let _daemon = fixture.start_daemon(&["--max-workers-for-pull-image", "2"]);
    fixture.node.wait_tag_complete("r.test/a", "small").await;
    let first: Vec<_> = fixture
        .cri
        .state()
        .pulls
        .iter()
        .take(2)
        .map(|p| p.image.clone().unwrap().image)
        .collect();
    assert!(
        first.contains(&"r.test/a:small".to_owned()),
        "the small job waited for the large one: {first:?}"
    );
    fixture
        .node
        .wait_node_image("all", |n| n.status.as_ref().is_some_and(|s| s.succeeded == 10))
        .await;
    assert_eq!(fixture.cri.state().max_active_pulls, 2);
}

#[tokio::test]
async fn removed_tag_or_node_image_cancels_pulls() {
    let fixture = DaemonFixture::start("removed").await;
    fixture.cri.state().pull_delay = Duration::from_secs(600);
    let daemon = fixture.start_daemon(&[]);
    fixture
        .node
        .create_node_image(
            json!({"r.test/a": {"tags": [tag("1", json!({}))]}, "r.test/b": {"tags": [tag("1", json!({}))]}}),
        )
        .await;
    fixture
        .cri
        .wait_until("both are pulled", |s| s.active_pulls == 2)
        .await;
    fixture.node.patch_images(json!({"r.test/a": null})).await;
    fixture
        .cri
        .wait_until("one is given up", |s| {
            s.cancelled_pulls == 1 && s.active_pulls == 1
        })
        .await;
    let node = fixture.node.wait_node_image("its status is gone", |n| {
        n.status
            .as_ref()
            .is_some_and(|s| !s.image_statuses.contains_key("r.test/a") && s.desired == 1)
    });
    node.await;
    fixture.node.delete_node_image().await;
    fixture
        .cri
        .wait_until("the other is given up", |s| {
            s.cancelled_pulls == 2 && s.active_pulls == 0
        })
        .await;
    assert_eq!(daemon.http_get("/healthz").await.0, 200);
}

#[tokio::test]
async fn failed_pull_is_retried_and_events_name_the_owner() {
    let fixture = DaemonFixture::start("failing").await;
    let refused = (
        tonic::Code::Unknown,
        "dial tcp 127.0.0.1:1: connect: connection refused".to_owned(),
    );
    fixture
        .cri
        .state()
        .pull_failures
        .insert("r.test/a:1".to_owned(), VecDeque::from(vec![refused; 2]));
    let _daemon = fixture.start_daemon(&[]);
    let tag_options = json!({"pullPolicy": {"backoffLimit": 1},
        "ownerReferences": [{"apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "namespace": "default",
            "name": "job", "uid": "uid-of-the-job"}]});
    fixture
        .node
        .create_node_image(json!({"r.test/a": {"tags": [tag("1", tag_options)]}}))
        .await;
    let retrying = fixture
        .node
        .wait_tag("r.test/a", "1", "trying again", |t| t.message.is_some())
        .await;
    assert_eq!(retrying.phase, ImagePullPhase::Pulling);
    let message = retrying.message.unwrap();
    assert!(
        message.contains("registry cannot be reached") && message.contains("attempt 1 of 2"),
        "{message}"
    );
    let finished = fixture.node.wait_tag_complete("r.test/a", "1").await;
    assert_eq!(
        (finished.phase, fixture.cri.calls("PullImage")),
        (ImagePullPhase::Failed, 2)
    );
    for uid in [fixture.node.uid().await.as_str(), "uid-of-the-job"] {
        let event_message = fixture.node.wait_event(uid, "PullImageFailed").await;
        assert!(
            event_message.contains("Image r.test/a:1")
                && event_message.contains("registry cannot be reached"),
            "{event_message}"
        );
    }
}

#[tokio::test]
async fn active_deadline_and_invalid_reference_fail_the_tag() {
    let fixture = DaemonFixture::start("deadline").await;
    fixture.cri.state().pull_delay = Duration::from_secs(600);
    let _daemon = fixture.start_daemon(&[]);
    let deadline = json!({"pullPolicy": {"activeDeadlineSeconds": 2}});
    fixture.node.create_node_image(json!({"r.test/a": {"tags": [tag("1", deadline)]}, "r.test/b": {"tags": [tag("no tag", json!({}))]}})).await;
    let bad = fixture.node.wait_tag_complete("r.test/b", "no tag").await;
    assert!(bad.message.unwrap().contains("\"r.test/b:no tag\" is not valid"));
    let late = fixture.node.wait_tag_complete("r.test/a", "1").await;
    assert!(
        late.message
            .unwrap()
            .starts_with("pulling exceeds the activeDeadlineSeconds")
    );
    fixture
        .cri
        .wait_until("the pull is given up", |s| s.cancelled_pulls == 1)
        .await;
}

#[tokio::test]
async fn daemon_crash_resumes_unfinished_pulls_only() {
    let fixture = DaemonFixture::start("crash").await;
    let daemon = fixture.start_daemon(&[]);
    fixture
        .node
        .create_node_image(json!({"r.test/a": {"tags": [tag("1", json!({"imagePullPolicy": "Always"}))]}}))
        .await;
    fixture.node.wait_tag_complete("r.test/a", "1").await;
    fixture.cri.state().pull_delay = Duration::from_secs(600);
    fixture
        .node
        .patch_images(json!({"r.test/b": {"tags": [tag("1", json!({}))]}}))
        .await;
    fixture
        .cri
        .wait_until("the second is pulled", |s| s.active_pulls == 1)
        .await;
    let started = fixture
        .node
        .wait_tag("r.test/b", "1", "started", |t| t.start_time.is_some())
        .await
        .start_time;
    daemon.kill().await;
    fixture
        .cri
        .wait_until("its pull is given up", |s| s.active_pulls == 0)
        .await;
    fixture.cri.state().pull_delay = Duration::ZERO;

    let _daemon = fixture.start_daemon(&[]);
    let finished = fixture.node.wait_tag_complete("r.test/b", "1").await;
    assert_eq!(finished.phase, ImagePullPhase::Succeeded);
    assert_eq!(
        finished.start_time, started,
        "its deadline counts from the first start"
    );
    let pulled: Vec<_> = fixture
        .cri
        .state()
        .pulls
        .iter()
        .map(|p| p.image.clone().unwrap().image)
        .collect();
    assert_eq!(pulled, ["r.test/a:1", "r.test/b:1", "r.test/b:1"]);
}

#[tokio::test]
async fn runtime_restart_uses_up_no_pull_attempt() {
    let mut fixture = DaemonFixture::start("runtime").await;
    fixture.cri.state().pull_delay = Duration::from_secs(600);
    let daemon = fixture.start_daemon(&[]);
    fixture
        .node
        .create_node_image(
            json!({"r.test/a": {"tags": [tag("1", json!({"pullPolicy": {"backoffLimit": 0}}))]}}),
        )
        .await;
    fixture
        .cri
        .wait_until("the pull begins", |s| s.active_pulls == 1)
        .await;
    // The watch of the socket's directory has no event for a runtime that does not respond.
    fixture.cri.crash().await;
    daemon
        .wait_for_response("/readyz", |status, body| {
            status != 200 && body.contains("container runtime")
        })
        .await;
    assert_eq!(
        daemon.http_get("/healthz").await.0,
        200,
        "a broken neighbour is no reason to be restarted"
    );
    fixture.cri.state().pull_delay = Duration::ZERO;
    fixture.cri.listen();
    assert_eq!(
        fixture.node.wait_tag_complete("r.test/a", "1").await.phase,
        ImagePullPhase::Succeeded
    );
    daemon
        .wait_for_response("/readyz", |status, _| status == 200)
        .await;
}

#[tokio::test]
async fn node_image_of_another_node_is_ignored() {
    let fixture = DaemonFixture::start("ours").await;
    let other = PullNode::on_shared_plane("theirs").await;
    let _daemon = fixture.start_daemon(&[]);
    other
        .create_node_image(json!({"r.test/theirs": {"tags": [tag("1", json!({}))]}}))
        .await;
    fixture
        .node
        .create_node_image(json!({"r.test/ours": {"tags": [tag("1", json!({}))]}}))
        .await;
    fixture.node.wait_tag_complete("r.test/ours", "1").await;
    assert_eq!(fixture.cri.calls("PullImage"), 1);
    assert!(other.images.get("theirs").await.unwrap().status.is_none());
}
