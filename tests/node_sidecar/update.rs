//! Injection, and updates of what was injected.

use serde_json::{Value, json};

use crate::sidecar_ops::{SidecarTest, condition, containers};
use crate::workloads::{exclusive_cluster, shared_cluster};

fn sidecar(image: &str) -> Value {
    json!([{ "name": "side", "image": image, "imagePullPolicy": "IfNotPresent" }])
}

fn records(pod: &Value, annotation: &str) -> Value {
    serde_json::from_str(pod["metadata"]["annotations"][annotation].as_str().unwrap()).unwrap()
}

#[tokio::test]
async fn sidecar_is_injected_and_updated_while_application_runs_on() {
    let sidecars = SidecarTest::create(shared_cluster().await, sidecar("kruise-test/term:1"), json!({}));
    let before = sidecars.create_ready_pod("web");
    let names: Vec<_> = before["spec"]["containers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| &c["name"])
        .collect();
    assert_eq!(names, ["side", "app"]);
    let status = sidecars.wait_status("one Pod that is ready", |status| status["updatedReadyPods"] == 1);
    assert_eq!(status["matchedPods"], 1);
    let record = &records(&before, "kruise.io/sidecarset-hash")[&sidecars.set];
    assert_eq!(record["sidecarList"], json!(["side"]));
    let set = sidecars.get();
    assert_eq!(
        record["hash"],
        set["metadata"]["annotations"]["kruise.io/sidecarset-hash"]
    );
    let revision = status["latestRevision"].as_str().unwrap().to_owned();
    let revisions = [
        "get",
        "controllerrevision",
        &revision,
        "--namespace=kruise-system",
    ];
    sidecars.plane().kubectl(&revisions).unwrap();

    sidecars.patch(json!({ "containers": sidecar("kruise-test/term:2") }));
    let updated = |status: &Value| status["updatedReadyPods"] == 1 && status["latestRevision"] != *revision;
    let status = sidecars.wait_status("the Pod updated and ready", updated);
    let after = sidecars.wait_pod("web", "upgradable", |pod| {
        condition(pod, "SidecarSetUpgradable") == "True"
    });
    assert_eq!(after["metadata"]["uid"], before["metadata"]["uid"]);
    assert_eq!(after["spec"]["containers"][0]["image"], "kruise-test/term:2");
    let (before, after_containers) = (containers(&before), containers(&after));
    assert_eq!(
        before["app"], after_containers["app"],
        "the application is not touched"
    );
    assert_ne!(before["side"].0, after_containers["side"].0);
    let record = &records(&after, "kruise.io/sidecarset-hash")[&sidecars.set];
    assert_eq!(record["controllerRevision"], status["latestRevision"]);
}

#[tokio::test]
async fn change_that_needs_a_new_pod_is_left_to_new_pods() {
    let sidecars = SidecarTest::create(shared_cluster().await, sidecar("kruise-test/term:1"), json!({}));
    let before = sidecars.create_ready_pod("web");
    sidecars.wait_status("one Pod that is ready", |status| status["updatedReadyPods"] == 1);
    let mut changed = sidecar("kruise-test/term:1");
    changed[0]["env"] = json!([{ "name": "LEVEL", "value": "debug" }]);
    sidecars.patch(json!({ "containers": changed }));
    let status = sidecars.wait_status("no updated Pod", |status| status["updatedPods"] == 0);
    assert_eq!(
        (&status["matchedPods"], &status["readyPods"]),
        (&json!(1), &json!(1))
    );
    let after = sidecars.wait_pod("web", "not upgradable", |pod| {
        condition(pod, "SidecarSetUpgradable") == "False"
    });
    assert_eq!(containers(&before), containers(&after));

    // The API server looks for changed policies once a second.
    sidecars.wait_dry_run("the new environment", |pod| {
        pod["spec"]["containers"][0]["env"][0]["value"] == "debug"
    });
    let new = sidecars.create_ready_pod("new");
    assert_eq!(new["spec"]["containers"][0]["env"][0]["value"], "debug");
    sidecars.wait_status("the new Pod updated", |status| {
        status["updatedReadyPods"] == 1 && status["matchedPods"] == 2
    });
}

#[tokio::test]
async fn hot_upgrade_hands_over_to_the_other_container() {
    let hot = |image: &str| {
        json!([{ "name": "side", "image": image, "imagePullPolicy": "IfNotPresent", "upgradeStrategy": {
            "upgradeType": "HotUpgrade", "hotUpgradeEmptyImage": "kruise-test/slow-stop:1" } }])
    };
    let sidecars = SidecarTest::create(shared_cluster().await, hot("kruise-test/term:1"), json!({}));
    let before = sidecars.create_ready_pod("web");
    let working =
        |pod: &Value| records(pod, "kruise.io/sidecarset-working-hotupgrade-container")["side"].clone();
    assert_eq!(working(&before), "side-1");
    sidecars.wait_status("one Pod that is ready", |status| status["updatedReadyPods"] == 1);

    sidecars.patch(json!({ "containers": hot("kruise-test/term:2") }));
    sidecars.wait_status("the Pod updated and ready", |status| {
        status["updatedReadyPods"] == 1
    });
    let after = sidecars.wait_pod("web", "the other works", |pod| working(pod) == "side-2");
    let images: Vec<_> = after["spec"]["containers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| &c["image"])
        .collect();
    let expected = [
        "kruise-test/slow-stop:1",
        "kruise-test/term:2",
        "kruise-test/term:1",
    ];
    assert_eq!(images, expected, "side-1 is switched off, side-2 works");
    assert_eq!(containers(&before)["app"], containers(&after)["app"]);
}

#[tokio::test]
async fn pods_are_created_while_all_programs_are_down_and_reported_later() {
    let test = exclusive_cluster().await;
    let mut sidecars = SidecarTest::create(test, sidecar("kruise-test/term:1"), json!({}));
    let by_policy = sidecars.plane().serves_mutating_policies().unwrap();
    if by_policy {
        sidecars.wait_status("a policy", |status| {
            status["conditions"][0]["reason"] == "PolicyInstalled"
        });
        let set = sidecars.set.clone();
        sidecars.wait_dry_run("injected by the policy", |pod| {
            let annotation = "kruise.io/sidecarset-hash";
            let injected = pod["metadata"]["annotations"][annotation].is_string();
            injected && records(pod, annotation)[&set]["updateTimestamp"].is_null()
        });
    }
    sidecars.test.cluster.manager.stop().unwrap();
    let pod = sidecars.create_ready_pod("web");
    let names: Vec<_> = pod["spec"]["containers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| &c["name"])
        .collect();
    sidecars.test.cluster.manager.start().unwrap();
    sidecars.test.cluster.manager.wait_for_readyz_text("leading");
    if by_policy {
        assert_eq!(names, ["side", "app"], "the API server injects it");
        sidecars.wait_status("the Pod", |status| status["updatedReadyPods"] == 1);
        return;
    }
    assert_eq!(names, ["app"], "the Pod starts without the sidecar");
    let status = sidecars.wait_status("the Pod without the sidecar", |status| {
        status["notInjectedPods"] == 1
    });
    assert_eq!(status["matchedPods"], 0);
}

#[tokio::test]
async fn pods_from_before_their_set_are_reported() {
    let containers = sidecar("kruise-test/term:1");
    let paused = json!({ "injectionStrategy": { "paused": true } });
    let sidecars = SidecarTest::create_without_wait(shared_cluster().await, containers, paused);
    sidecars.create_ready_pod("bare");
    sidecars.patch(json!({ "injectionStrategy": { "paused": false } }));
    let status = sidecars.wait_status("the Pod without the sidecar", |status| {
        status["notInjectedPods"] == 1
    });
    assert_eq!(status["matchedPods"], 0);
    let events = [
        "get",
        "events",
        "--all-namespaces",
        "-o",
        "json",
        "--field-selector=reason=SidecarNotInjected",
    ];
    let events = sidecars.plane().kubectl(&events).unwrap();
    let expected = format!("{}/bare", sidecars.test.namespace);
    assert!(events.contains(&expected), "{events}");
    sidecars.test.kubectl(&["delete", "pod", "bare"]);
    sidecars.wait_status("no such Pod", |status| status["notInjectedPods"].is_null());
}
