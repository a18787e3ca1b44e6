//! `rollout`: pause, resume, status, history and undo, with our manager.

use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_api::cloneset::CloneSet;
use kruise_api::sidecarset::SidecarSet;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::fixture::Fixture;
use crate::plugin::{cluster_without_manager, run, start, wait};
use crate::test_cluster::{api, create, merge_status, shared_cluster, wait_until};

#[tokio::test]
async fn undo_restores_the_template_exactly() {
    let fixture = Fixture::new(shared_cluster(), "plugin-undo").await;
    let cluster = fixture.cluster;
    let template = json!({
        "metadata": { "labels": { "app": "web" }, "annotations": { "note": "first" } },
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "initContainers": [{ "name": "setup", "image": "example.com/setup:1" }],
            "containers": [{ "name": "app", "image": "example.com/app:1", "env": [{ "name": "A", "value": "" }],
                "readinessProbe": { "grpc": { "port": 1 } } }],
            "volumes": [{ "name": "v", "emptyDir": {} }],
        },
    });
    fixture
        .create_from_template("web", template, json!("100%"), &json!({ "replicas": 1 }))
        .await;
    let first = fixture.wait_status("web", "revision", |set| {
        set.status
            .as_ref()
            .is_some_and(|status| !status.update_revision.is_empty())
    });
    let first = first.await;
    let second = json!({ "template": {
        "metadata": { "annotations": { "note": null, "other": "second" } },
        "spec": { "volumes": null, "hostNetwork": true } } });
    fixture
        .set_image_and_spec("web", "example.com/app:2", second)
        .await;
    let update = |set: &kruise_api::cloneset::CloneSet| set.status.clone().unwrap().update_revision;
    let changed = fixture
        .wait_status("web", "second revision", |set| update(set) != update(&first))
        .await;
    assert_ne!(changed.spec.template, first.spec.template);

    let history = run(
        cluster,
        &[
            "rollout",
            "history",
            "clone/web",
            "-o",
            "json",
            "-n",
            "plugin-undo",
        ],
    )
    .await;
    let history = history.expect(0).json();
    let revisions = history["revisions"].as_array().unwrap();
    let numbers: Vec<&Value> = revisions.iter().map(|revision| &revision["revision"]).collect();
    assert_eq!(numbers, [1, 2]);
    assert_eq!(
        revisions[0]["images"],
        json!(["example.com/setup:1", "example.com/app:1"])
    );
    assert_eq!(
        (&revisions[0]["updateRevision"], &revisions[1]["updateRevision"]),
        (&json!(false), &json!(true))
    );
    assert_eq!(revisions[0]["name"], update(&first));

    let undo = ["rollout", "undo", "clone/web", "-n", "plugin-undo"];
    let output = run(cluster, &undo).await.expect(0);
    assert_eq!(
        output.stdout,
        "cloneset.apps.kruise.io/web rolled back to revision 1\n"
    );
    let restored = fixture
        .wait_status("web", "first revision", |set| update(set) == update(&first))
        .await;
    assert_eq!(restored.spec.template, first.spec.template);
    let table = run(
        cluster,
        &["rollout", "history", "cloneset/web", "-n", "plugin-undo"],
    )
    .await
    .expect(0)
    .stdout;
    // The manager has made the old revision the newest.
    assert!(
        table
            .lines()
            .nth(2)
            .unwrap()
            .starts_with(&format!("3          {} ", update(&first))),
        "{table}"
    );

    let to = |number: &'static str| [&undo[..], &["--to-revision", number]].concat();
    let output = run(cluster, &to("3")).await.expect(0);
    assert!(
        output
            .stdout
            .ends_with("skipped rollback (current template already matches revision 3)\n"),
        "{output:?}"
    );
    let output = run(cluster, &to("9")).await.expect(1);
    assert!(
        output
            .stderr
            .starts_with("error: unable to find specified revision 9 in history"),
        "{output:?}"
    );
    run(cluster, &to("2")).await.expect(0);
    let restored = fixture
        .wait_status("web", "second revision", |set| update(set) == update(&changed))
        .await;
    assert_eq!(restored.spec.template, changed.spec.template);
}

/// The test plays the manager: it does not observe a spec whose template it refuses.
#[tokio::test]
async fn refused_template_is_shown_and_undone() {
    let cluster = cluster_without_manager();
    let admin = cluster.admin().await;
    let sets: Api<CloneSet> = api(&admin);
    let labels = json!({ "app": "refused" });
    let template = |image: &str| {
        json!({ "metadata": { "labels": labels },
            "spec": { "containers": [{ "name": "app", "image": image }] } })
    };
    let spec = json!({ "selector": { "matchLabels": labels }, "template": template("app:1") });
    let set = create(&sets, json!({ "metadata": { "name": "refused" }, "spec": spec })).await;
    let owner = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "refused",
        "uid": set.metadata.uid, "controller": true });
    let revision = json!({ "metadata": { "name": "refused-a", "labels": labels, "ownerReferences": [owner] },
        "revision": 1, "data": { "spec": { "template": template("app:1") } } });
    create(&api::<ControllerRevision>(&admin), revision).await;
    let patch = Patch::Merge(json!({ "spec": { "template": template("app:2") } }));
    sets.patch("refused", &PatchParams::default(), &patch)
        .await
        .unwrap();
    let waiting = json!({ "type": "Waiting", "status": "True", "reason": "TemplateRefused", "message": "no such field" });
    let status = json!({ "observedGeneration": set.metadata.generation, "replicas": 1, "readyReplicas": 1,
        "availableReplicas": 1, "updatedReplicas": 1, "updatedReadyReplicas": 1, "updateRevision": "refused-a",
        "currentRevision": "refused-a", "conditions": [waiting] });
    merge_status(&sets, "refused", status).await;

    let once = ["rollout", "status", "clone/refused", "--watch=false"];
    let output = run(cluster, &once).await.expect(1);
    assert!(
        output.stderr.ends_with("TemplateRefused: no such field\n"),
        "{output:?}"
    );
    let output = run(cluster, &["rollout", "undo", "clone/refused"])
        .await
        .expect(0);
    assert_eq!(
        output.stdout,
        "cloneset.apps.kruise.io/refused rolled back to revision 1\n"
    );
    let restored = sets.get("refused").await.unwrap();
    assert_eq!(restored.spec.template["spec"]["containers"][0]["image"], "app:1");
}

#[tokio::test]
async fn rollout_is_paused_resumed_and_followed() {
    let fixture = Fixture::new(shared_cluster(), "plugin-rollout").await;
    let cluster = fixture.cluster;
    fixture.create_cloneset("web", json!({})).await;
    let in_namespace = |args: &[&'static str]| [args, &["-n", "plugin-rollout"]].concat();
    let output = run(cluster, &in_namespace(&["rollout", "status", "clone/web"]))
        .await
        .expect(0);
    assert!(
        output
            .stdout
            .ends_with("cloneset \"web\" successfully rolled out\n"),
        "{output:?}"
    );

    let pause = in_namespace(&["rollout", "pause", "clone/web"]);
    let output = run(cluster, &pause).await.expect(0);
    assert_eq!(output.stdout, "cloneset.apps.kruise.io/web paused\n");
    let output = run(cluster, &pause).await.expect(1);
    assert_eq!(
        output.stderr,
        "error: clonesets.apps.kruise.io \"web\" is already paused\n"
    );
    fixture.set_image("web", "example.com/app:2").await;
    let updated = |set: &kruise_api::cloneset::CloneSet| set.status.clone().unwrap().updated_replicas;
    fixture
        .wait_status("web", "paused", |set| updated(set) == 0)
        .await;
    let once = in_namespace(&["rollout", "status", "clone/web", "--watch=false"]);
    let output = run(cluster, &once).await.expect(0);
    assert!(
        output
            .stdout
            .starts_with("The rollout is paused: 0 of 3 Pods have been updated."),
        "{output:?}"
    );
    let limited = in_namespace(&["rollout", "status", "clone/web", "--timeout", "1s"]);
    let output = run(cluster, &limited).await.expect(2);
    assert!(
        output
            .stderr
            .ends_with("timed out after 1s; the rollout continues\n"),
        "{output:?}"
    );

    let follower = start(cluster, &in_namespace(&["rollout", "status", "clone/web"]));
    let output = run(cluster, &in_namespace(&["rollout", "resume", "clone/web"]))
        .await
        .expect(0);
    assert_eq!(output.stdout, "cloneset.apps.kruise.io/web resumed\n");
    let output = wait(follower).await.expect(0);
    assert!(
        output
            .stdout
            .ends_with("cloneset \"web\" successfully rolled out\n"),
        "{output:?}"
    );
    let output = run(cluster, &["rollout", "status", "clone/none"]).await.expect(1);
    assert_eq!(
        output.stderr,
        "Error from server (NotFound): clonesets.apps.kruise.io \"none\" not found\n"
    );
}

#[tokio::test]
async fn sidecar_set_is_paused_and_rolled_back() {
    let cluster = shared_cluster();
    let admin = cluster.admin().await;
    let sets = Api::<SidecarSet>::all(admin.client.clone());
    let container = |image: &str| json!([{ "name": "log", "image": image }]);
    let spec = json!({ "selector": { "matchLabels": { "log": "plugin" } }, "containers": container("log:1"),
        "volumes": [{ "name": "v", "emptyDir": {} }] });
    create(
        &sets,
        json!({ "metadata": { "name": "plugin-log" }, "spec": spec }),
    )
    .await;
    let latest = |set: &SidecarSet| set.status.clone().unwrap_or_default().latest_revision;
    let first = wait_until(&sets, "plugin-log", "first revision", |set: &SidecarSet| {
        !latest(set).is_empty()
    })
    .await;
    let patch = json!({ "spec": { "containers": container("log:2"), "volumes": null } });
    let patch = kube::api::Patch::Merge(patch);
    sets.patch("plugin-log", &kube::api::PatchParams::default(), &patch)
        .await
        .unwrap();
    let (before, name) = (latest(&first), "plugin-log");
    let is_other = move |set: &SidecarSet| latest(set) != before;
    wait_until(&sets, name, "second revision", is_other).await;

    run(cluster, &["rollout", "pause", "sidecarset/plugin-log"])
        .await
        .expect(0);
    assert!(sets.get(name).await.unwrap().spec.update_strategy.unwrap().paused);
    run(cluster, &["rollout", "resume", "sidecarset/plugin-log"])
        .await
        .expect(0);
    let history = run(
        cluster,
        &["rollout", "history", "sidecarset/plugin-log", "-o", "json"],
    )
    .await
    .expect(0)
    .json();
    assert_eq!(history["revisions"].as_array().unwrap().len(), 2, "{history}");
    let output = run(cluster, &["rollout", "undo", "sidecarset/plugin-log"])
        .await
        .expect(0);
    assert_eq!(
        output.stdout,
        "sidecarset.apps.kruise.io/plugin-log rolled back to revision 1\n"
    );
    let before = latest(&first);
    let restored = wait_until(&sets, name, "first revision again", move |set| {
        latest(set) == before
    })
    .await;
    assert_eq!(restored.spec.containers, first.spec.containers);
    assert_eq!(restored.spec.volumes, first.spec.volumes);
    let output = run(cluster, &["rollout", "status", "sidecarset/plugin-log"])
        .await
        .expect(0);
    assert_eq!(
        output.stdout,
        "sidecarset \"plugin-log\" successfully rolled out\n"
    );
}
