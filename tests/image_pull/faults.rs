//! What the daemon makes of asks, ends, failures and restarts.

use std::collections::VecDeque;
use std::time::Duration;

use kruise_api::node_image::ImagePullPhase;
use serde_json::json;

use crate::daemon::Daemon;
use crate::world::{Node, tag};
use support::fault_cri::FaultCri;

pub struct Bed {
    pub dir: tempfile::TempDir,
    pub node: Node,
    pub cri: FaultCri,
}

impl Bed {
    pub async fn make(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let node = Node::make(name).await;
        let cri = FaultCri::start(&dir.path().join("cri.sock"));
        Self { dir, node, cri }
    }

    pub fn daemon(&self, more: &[&str]) -> Daemon {
        Daemon::start(
            &self.node,
            &self.dir.path().join("cri.sock"),
            self.dir.path(),
            more,
        )
    }
}

const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

#[tokio::test]
async fn tags_and_digests_are_pulled_and_told() {
    let bed = Bed::make("plain").await;
    let daemon = bed.daemon(&[]);
    bed.node
        .ask(
            json!({"r.test/app": {"tags": [tag("v1", json!({})), tag(DIGEST, json!({}))],
        "sandboxConfig": {"labels": {"l": "1"}, "annotations": {"a": "2"}}}}),
        )
        .await;
    let status = bed.node.until_over("r.test/app", "v1").await;
    assert_eq!(
        (status.phase, status.progress, status.message),
        (ImagePullPhase::Succeeded, 100, None)
    );
    assert!(status.image_id.unwrap().starts_with("r.test/app@sha256:"));
    assert!(status.start_time.unwrap().0 <= status.completion_time.unwrap().0);
    let status = bed.node.until_over("r.test/app", DIGEST).await;
    assert_eq!(status.phase, ImagePullPhase::Succeeded);
    let node = bed
        .node
        .until_node("all counted", |n| {
            n.status.as_ref().is_some_and(|s| s.succeeded == 2)
        })
        .await;
    let counted = node.status.unwrap();
    assert_eq!(
        (counted.desired, counted.failed, counted.pulling, counted.waiting),
        (2, 0, 0, 0)
    );

    what_was_asked_of_the_runtime(&bed);
    let note = bed
        .node
        .until_event(&bed.node.uid().await, "PullImageSucceed")
        .await;
    assert!(note.starts_with("Image r.test/app"), "{note}");
    assert!(
        daemon.stop().await < Duration::from_secs(5),
        "TERM must end it soon"
    );
}

fn what_was_asked_of_the_runtime(bed: &Bed) {
    let pulls = bed.cri.state().pulls.clone();
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
async fn an_image_that_is_present_costs_a_write_or_two_and_no_pull() {
    let bed = Bed::make("present").await;
    bed.cri.state().add_image("docker.io/library/nginx:1");
    let daemon = bed.daemon(&[]);
    daemon.until("/readyz", |status, _| status == 200).await;
    bed.node
        .ask(json!({"nginx": {"tags": [tag("1", json!({}))]}}))
        .await;
    bed.node.until_over("nginx", "1").await;
    assert_eq!(bed.cri.calls("PullImage"), 0);
    // One, unless the machine is so busy that the start was told before.
    daemon.until_writes(1..=2).await;

    bed.node
        .change(json!({"nginx": {"tags": [tag("1", json!({"version": 1, "imagePullPolicy": "Always"}))]}}))
        .await;
    bed.node
        .until("nginx", "1", "pulled again", |t| {
            t.version == 1 && t.completion_time.is_some()
        })
        .await;
    assert_eq!(bed.cri.calls("PullImage"), 1, "Always pulls what is present");
    daemon.until_writes(2..=4).await;
}

#[tokio::test]
async fn no_more_are_pulled_at_once_than_the_flag_says_and_small_jobs_do_not_wait_for_large_ones() {
    let bed = Bed::make("fair").await;
    bed.cri.state().pull_takes = Duration::from_millis(300);
    let owner = |uid: &str| json!({"ownerReferences": [{"kind": "ImagePullJob", "namespace": uid, "name": uid, "uid": uid}]});
    let mut tags: Vec<_> = (0..9)
        .map(|n| tag(&format!("large{n}"), owner("large")))
        .collect();
    tags.push(tag("small", owner("small")));
    bed.node.ask(json!({"r.test/a": {"tags": tags}})).await;
    let _daemon = bed.daemon(&["--max-workers-for-pull-image", "2"]);
    bed.node.until_over("r.test/a", "small").await;
    let first: Vec<_> = bed
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
    bed.node
        .until_node("all", |n| n.status.as_ref().is_some_and(|s| s.succeeded == 10))
        .await;
    assert_eq!(bed.cri.state().pulling_most, 2);
}

#[tokio::test]
async fn a_tag_that_is_removed_is_cancelled_and_so_is_all_when_the_object_goes() {
    let bed = Bed::make("removed").await;
    bed.cri.state().pull_takes = Duration::from_secs(600);
    let daemon = bed.daemon(&[]);
    bed.node
        .ask(
            json!({"r.test/a": {"tags": [tag("1", json!({}))]}, "r.test/b": {"tags": [tag("1", json!({}))]}}),
        )
        .await;
    bed.cri.until("both are pulled", |s| s.pulling == 2).await;
    bed.node.change(json!({"r.test/a": null})).await;
    bed.cri
        .until("one is given up", |s| s.pulls_dropped == 1 && s.pulling == 1)
        .await;
    let node = bed.node.until_node("its status is gone", |n| {
        n.status
            .as_ref()
            .is_some_and(|s| !s.image_statuses.contains_key("r.test/a") && s.desired == 1)
    });
    node.await;
    bed.node.delete().await;
    bed.cri
        .until("the other is given up", |s| {
            s.pulls_dropped == 2 && s.pulling == 0
        })
        .await;
    assert_eq!(daemon.get("/healthz").await.0, 200);
}

#[tokio::test]
async fn a_failure_is_repeated_told_and_ends_with_events_on_the_owner_too() {
    let bed = Bed::make("failing").await;
    let refused = (
        tonic::Code::Unknown,
        "dial tcp 127.0.0.1:1: connect: connection refused".to_owned(),
    );
    bed.cri
        .state()
        .pull_failures
        .insert("r.test/a:1".to_owned(), VecDeque::from(vec![refused; 2]));
    let _daemon = bed.daemon(&[]);
    let more = json!({"pullPolicy": {"backoffLimit": 1},
        "ownerReferences": [{"apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "namespace": "default",
            "name": "job", "uid": "uid-of-the-job"}]});
    bed.node
        .ask(json!({"r.test/a": {"tags": [tag("1", more)]}}))
        .await;
    let trying = bed
        .node
        .until("r.test/a", "1", "trying again", |t| t.message.is_some())
        .await;
    assert_eq!(trying.phase, ImagePullPhase::Pulling);
    let words = trying.message.unwrap();
    assert!(
        words.contains("registry cannot be reached") && words.contains("attempt 1 of 2"),
        "{words}"
    );
    let over = bed.node.until_over("r.test/a", "1").await;
    assert_eq!(
        (over.phase, bed.cri.calls("PullImage")),
        (ImagePullPhase::Failed, 2)
    );
    for uid in [bed.node.uid().await.as_str(), "uid-of-the-job"] {
        let note = bed.node.until_event(uid, "PullImageFailed").await;
        assert!(
            note.contains("Image r.test/a:1") && note.contains("registry cannot be reached"),
            "{note}"
        );
    }
}

#[tokio::test]
async fn the_deadline_ends_a_pull_that_hangs_and_a_bad_reference_ends_at_once() {
    let bed = Bed::make("deadline").await;
    bed.cri.state().pull_takes = Duration::from_secs(600);
    let _daemon = bed.daemon(&[]);
    let limit = json!({"pullPolicy": {"activeDeadlineSeconds": 2}});
    bed.node.ask(json!({"r.test/a": {"tags": [tag("1", limit)]}, "r.test/b": {"tags": [tag("no tag", json!({}))]}})).await;
    let bad = bed.node.until_over("r.test/b", "no tag").await;
    assert!(bad.message.unwrap().contains("\"r.test/b:no tag\" is not valid"));
    let late = bed.node.until_over("r.test/a", "1").await;
    assert!(
        late.message
            .unwrap()
            .starts_with("pulling exceeds the activeDeadlineSeconds")
    );
    bed.cri
        .until("the pull is given up", |s| s.pulls_dropped == 1)
        .await;
}

#[tokio::test]
async fn after_a_crash_of_the_daemon_the_work_goes_on_and_nothing_finished_is_repeated() {
    let bed = Bed::make("crash").await;
    let daemon = bed.daemon(&[]);
    bed.node
        .ask(json!({"r.test/a": {"tags": [tag("1", json!({"imagePullPolicy": "Always"}))]}}))
        .await;
    bed.node.until_over("r.test/a", "1").await;
    bed.cri.state().pull_takes = Duration::from_secs(600);
    bed.node
        .change(json!({"r.test/b": {"tags": [tag("1", json!({}))]}}))
        .await;
    bed.cri.until("the second is pulled", |s| s.pulling == 1).await;
    let started = bed
        .node
        .until("r.test/b", "1", "started", |t| t.start_time.is_some())
        .await
        .start_time;
    daemon.kill().await;
    bed.cri.until("its pull is given up", |s| s.pulling == 0).await;
    bed.cri.state().pull_takes = Duration::ZERO;

    let _daemon = bed.daemon(&[]);
    let over = bed.node.until_over("r.test/b", "1").await;
    assert_eq!(over.phase, ImagePullPhase::Succeeded);
    assert_eq!(
        over.start_time, started,
        "its deadline counts from the first start"
    );
    let pulled: Vec<_> = bed
        .cri
        .state()
        .pulls
        .iter()
        .map(|p| p.image.clone().unwrap().image)
        .collect();
    assert_eq!(pulled, ["r.test/a:1", "r.test/b:1", "r.test/b:1"]);
}

#[tokio::test]
async fn a_runtime_that_goes_away_and_comes_back_costs_no_attempt() {
    let mut bed = Bed::make("runtime").await;
    bed.cri.state().pull_takes = Duration::from_secs(600);
    let daemon = bed.daemon(&[]);
    bed.node
        .ask(json!({"r.test/a": {"tags": [tag("1", json!({"pullPolicy": {"backoffLimit": 0}}))]}}))
        .await;
    bed.cri.until("the pull begins", |s| s.pulling == 1).await;
    // No event of the socket's directory tells that it does not answer.
    bed.cri.crash().await;
    daemon
        .until("/readyz", |status, body| {
            status != 200 && body.contains("container runtime")
        })
        .await;
    assert_eq!(
        daemon.get("/healthz").await.0,
        200,
        "a broken neighbour is no reason to be restarted"
    );
    bed.cri.state().pull_takes = Duration::ZERO;
    bed.cri.listen();
    assert_eq!(
        bed.node.until_over("r.test/a", "1").await.phase,
        ImagePullPhase::Succeeded
    );
    daemon.until("/readyz", |status, _| status == 200).await;
}

#[tokio::test]
async fn the_nodeimage_of_another_node_is_not_ours() {
    let bed = Bed::make("ours").await;
    let other = Node::make("theirs").await;
    let _daemon = bed.daemon(&[]);
    other
        .ask(json!({"r.test/theirs": {"tags": [tag("1", json!({}))]}}))
        .await;
    bed.node
        .ask(json!({"r.test/ours": {"tags": [tag("1", json!({}))]}}))
        .await;
    bed.node.until_over("r.test/ours", "1").await;
    assert_eq!(bed.cri.calls("PullImage"), 1);
    assert!(other.images.get("theirs").await.unwrap().status.is_none());
}
