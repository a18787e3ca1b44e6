//! `pull`: a job that is followed to its end, with our manager.

use kruise_api::node_image::NodeImage;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::plugin::{run, start, start_as_printed, wait};
use crate::test_cluster::{
    PullOutcome, create_nodes, jobs, report_pull_of, shared_cluster, wait_for_tag, wait_until,
};

#[tokio::test]
async fn pull_follows_the_job_to_its_end() {
    let cluster = shared_cluster();
    let admin = cluster.admin().await;
    create_nodes(&admin, &["pull-a", "pull-b"], json!({ "pool": "pull" })).await;
    let args = [
        "pull",
        "plugin:1",
        "--selector",
        "pool=pull",
        "--parallelism",
        "2",
        "--name",
        "warm",
    ];
    let child = start(cluster, &args);
    for node in ["pull-a", "pull-b"] {
        let image = wait_for_tag(&admin, node, "plugin", "1").await;
        report_pull_of(&admin, &image, PullOutcome::Succeeded).await;
    }
    let output = wait(child).await.expect(0);
    let lines: Vec<&str> = output.stdout.lines().collect();
    assert_eq!(
        lines,
        [
            "imagepulljob.apps.kruise.io/warm created",
            "plugin:1 is on 2 node(s)"
        ]
    );
    assert!(
        output.stderr.contains("of 2 node(s) have the image"),
        "{}",
        output.stderr
    );
    let again = run(cluster, &args).await.expect(1);
    assert!(
        again.stderr.starts_with("Error from server (AlreadyExists): "),
        "{again:?}"
    );
}

#[tokio::test]
async fn failed_nodes_are_named_with_their_cause() {
    let cluster = shared_cluster();
    let admin = cluster.admin().await;
    create_nodes(&admin, &["fail-a", "fail-b"], json!({})).await;
    let child = start(
        cluster,
        &[
            "pull",
            "broken:1",
            "--nodes",
            "fail-a,fail-b",
            "--parallelism",
            "2",
            "--pin",
            "1h",
        ],
    );
    for (node, result) in [
        ("fail-a", PullOutcome::Succeeded),
        ("fail-b", PullOutcome::Failed("no\u{1b}[2J image")),
    ] {
        let image = wait_for_tag(&admin, node, "broken", "1").await;
        report_pull_of(&admin, &image, result).await;
    }
    let output = wait(child).await.expect(1);
    assert!(
        output
            .stdout
            .starts_with("imagepulljob.apps.kruise.io/pull-broken-"),
        "{output:?}"
    );
    assert!(
        output.stdout.ends_with("node fail-b: no\\u{1b}[2J image\n"),
        "{output:?}"
    );
    let (_, hint) = output
        .stderr
        .split_once(
            "error: broken:1 could not be pulled on 1 of 2 node(s). To pull again there:\n  kubectl kruise ",
        )
        .unwrap();
    let child = start_as_printed(hint.split_whitespace().chain(["--name", "retried"]));
    let images = Api::<NodeImage>::all(admin.client.clone());
    let is_repeated = |image: &NodeImage| {
        let tag = &image.spec.images["broken"].tags[0];
        tag.version > 0
            && tag
                .pull_policy
                .as_ref()
                .is_some_and(|policy| policy.pin_seconds == Some(3600))
    };
    let image = wait_until(&images, "fail-b", "the pull is repeated", is_repeated).await;
    report_pull_of(&admin, &image, PullOutcome::Succeeded).await;
    let output = wait(child).await.expect(0);
    assert!(
        output.stdout.ends_with("broken:1 is on 1 node(s)\n"),
        "{output:?}"
    );
    let none = run(cluster, &["pull", "--retry", "retried"]).await.expect(0);
    assert_eq!(
        none.stdout,
        "imagepulljob.apps.kruise.io/retried failed on no node; nothing was created\n"
    );
    let both = run(cluster, &["pull", "broken:1", "--retry", "retried"]).await;
    assert!(both.expect(2).stderr.contains("cannot be used with"));
}

#[tokio::test]
async fn selector_that_matches_no_node_is_a_failure() {
    let args = ["pull", "typo:1", "--selector", "pool=typo", "--name", "typo"];
    let output = run(shared_cluster(), &args).await.expect(1);
    assert_eq!(output.stdout, "imagepulljob.apps.kruise.io/typo created\n");
    assert!(
        output
            .stderr
            .ends_with("error: no node matches the selector; nothing was pulled\n"),
        "{output:?}"
    );
}

/// No daemon answers on this node.
#[tokio::test]
async fn timeout_and_interrupt_leave_the_job() {
    let cluster = shared_cluster();
    let admin = cluster.admin().await;
    create_nodes(&admin, &["silent"], json!({})).await;
    let pull = ["pull", "slow:1", "--nodes", "silent"];
    let output = run(
        cluster,
        &[&pull[..], &["--timeout", "2s", "--name", "late"]].concat(),
    )
    .await
    .expect(2);
    assert!(
        output
            .stderr
            .contains("error: timed out after 2s; the job continues."),
        "{output:?}"
    );
    assert!(
        output
            .stderr
            .contains("\n  kubectl delete imagepulljob late -n default --kubeconfig /"),
        "{output:?}"
    );

    let mut child = start(cluster, &[&pull[..], &["--name", "interrupted"]].concat());
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    // The first line comes after the signal handler was installed.
    lines.next_line().await.unwrap().unwrap();
    let pid = i32::try_from(child.id().unwrap()).unwrap();
    kill(Pid::from_raw(pid), Signal::SIGINT).unwrap();
    let mut rest = String::new();
    while let Some(line) = lines.next_line().await.unwrap() {
        rest += &line;
    }
    wait(child).await.expect(130);
    assert!(
        rest.contains("kubectl get imagepulljob interrupted -n default --kubeconfig /"),
        "{rest}"
    );

    let unwaited = run(
        cluster,
        &[&pull[..], &["--wait=false", "--name", "unwaited"]].concat(),
    )
    .await
    .expect(0);
    assert_eq!(unwaited.stdout, "imagepulljob.apps.kruise.io/unwaited created\n");
    let list = jobs(&admin).list(&ListParams::default()).await.unwrap();
    let names: Vec<String> = list.iter().map(ResourceExt::name_any).collect();
    for name in ["late", "interrupted", "unwaited"] {
        assert!(names.iter().any(|other| other == name), "{names:?}");
    }
}

#[tokio::test]
async fn deleted_job_ends_the_wait() {
    let cluster = shared_cluster();
    let admin = cluster.admin().await;
    create_nodes(&admin, &["deleted"], json!({})).await;
    let child = start(
        cluster,
        &["pull", "gone:1", "--nodes", "deleted", "--name", "gone"],
    );
    wait_for_tag(&admin, "deleted", "gone", "1").await;
    jobs(&admin)
        .delete("gone", &kube::api::DeleteParams::default())
        .await
        .unwrap();
    let output = wait(child).await.expect(1);
    assert!(
        output
            .stderr
            .ends_with("imagepulljobs.apps.kruise.io \"gone\" was deleted\n"),
        "{output:?}"
    );
}
