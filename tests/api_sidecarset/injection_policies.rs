//! Policies that the manager installs, and what happens to them.

use serde_json::{Value, json};

use crate::fixture::{BINDINGS, POLICIES, SidecarCluster, image, injected_by_policy, names, record};

/// The versions of the policies and bindings that have this label, by name.
fn versions(cluster: &SidecarCluster) -> Vec<(String, String)> {
    let columns = "custom-columns=NAME:.metadata.name,VERSION:.metadata.resourceVersion";
    let kinds = format!("{POLICIES},{BINDINGS}");
    let args = [
        "get",
        &kinds,
        "-l",
        "kruise.io/sidecarset-name",
        "--no-headers",
        "-o",
        columns,
    ];
    let list = cluster.plane.kubectl(&args).unwrap();
    let mut versions: Vec<_> = list
        .lines()
        .filter_map(|line| line.split_once(char::is_whitespace))
        .map(|(name, version)| (name.to_owned(), version.trim().to_owned()))
        .collect();
    versions.sort();
    versions
}

#[tokio::test]
async fn api_server_injects_while_all_programs_are_down() {
    let mut cluster = SidecarCluster::start("");
    let set = cluster.create_set("web", json!({}));
    if !cluster.serves_policies() {
        // The webhook does it, and there is nothing to say.
        let pod = cluster.wait_dry_run("web", "injected", |pod| names(pod).len() == 2);
        assert!(record(&pod, "web")["updateTimestamp"].is_string());
        assert_eq!(
            injected_by_policy(&cluster.get("sidecarset", "web").unwrap()),
            Value::Null
        );
        cluster.manager.stop().unwrap();
        assert_eq!(
            names(&cluster.dry_run("web")),
            ["app"],
            "the Pod starts without the sidecar"
        );
        return;
    }
    cluster.wait_injected_by("web", "True", "PolicyInstalled");
    let revision = &set["status"]["latestRevision"];
    let by_policy = |pod: &Value| {
        let record = record(pod, "web");
        record["updateTimestamp"].is_null() && record["controllerRevision"] == *revision
    };
    let pod = cluster.wait_dry_run("web", "injected by the policy", by_policy);
    assert_eq!(names(&pod), ["side-web", "app"]);
    let annotations = &set["metadata"]["annotations"];
    assert_eq!(
        record(&pod, "web")["hash"],
        annotations["kruise.io/sidecarset-hash"]
    );
    let installed = versions(&cluster);
    assert_eq!(installed.len(), 2, "{installed:?}");

    cluster.manager.stop().unwrap();
    assert_eq!(names(&cluster.dry_run("web")), ["side-web", "app"]);

    // A manager that starts writes nothing that is there.
    cluster.manager.start().unwrap();
    cluster.create_set("other", json!({}));
    cluster.wait_injected_by("other", "True", "PolicyInstalled");
    let after = versions(&cluster);
    assert_eq!(after.len(), 4, "{after:?}");
    assert!(
        installed.iter().all(|one| after.contains(one)),
        "{installed:?} {after:?}"
    );
}

#[tokio::test]
async fn policy_follows_its_set() {
    let mut cluster = SidecarCluster::start("");
    if !cluster.serves_policies() {
        return;
    }
    cluster.create_set("web", json!({}));
    cluster.create_set("other", json!({}));
    for set in ["web", "other"] {
        cluster.wait_injected_by(set, "True", "PolicyInstalled");
    }
    let policy = |name: &str| cluster.get(POLICIES, &format!("sidecarset-{name}"));
    let version = |policy: Option<Value>| policy.unwrap()["metadata"]["resourceVersion"].clone();
    let other = version(policy("other"));
    cluster.patch_set(
        "web",
        &json!({ "spec": { "containers": [{ "name": "side-web", "image": "side:2" }] } }),
    );
    cluster.wait_dry_run("web", "the new image", |pod| image(pod, "side-web") == "side:2");
    // Its revision is part of the same write.
    let generation = &policy("web").unwrap()["metadata"]["generation"];
    assert_eq!(*generation, 2);
    let set = cluster.wait_set("web", "the new revision", |set| {
        set["status"]["observedGeneration"] == set["metadata"]["generation"]
    });
    let revision = &record(&cluster.dry_run("web"), "web")["controllerRevision"];
    assert_eq!(*revision, set["status"]["latestRevision"]);
    assert_eq!(
        version(policy("other")),
        other,
        "a set for other Pods has nothing to do with it"
    );

    // What another client changes or deletes comes back.
    let spoiled = json!({ "spec": { "failurePolicy": "Fail" } }).to_string();
    let args = [
        "patch",
        POLICIES,
        "sidecarset-web",
        "--type=merge",
        "-p",
        &spoiled,
    ];
    cluster.plane.kubectl(&args).unwrap();
    cluster.wait_until("the changed policy is as before", || {
        let found = policy("web").unwrap();
        if found["spec"]["failurePolicy"] == "Ignore" {
            Ok(())
        } else {
            Err(found.to_string())
        }
    });
    for kind in [POLICIES, BINDINGS] {
        let uid = cluster.get(kind, "sidecarset-web").unwrap()["metadata"]["uid"].clone();
        cluster
            .plane
            .kubectl(&["delete", kind, "sidecarset-web"])
            .unwrap();
        cluster.wait_until("the deleted object is there again", || {
            match cluster.get(kind, "sidecarset-web") {
                Some(found) if found["metadata"]["uid"] != uid => Ok(()),
                found => Err(format!("{found:?}")),
            }
        });
    }

    // Paused or deleted: no policy, and nothing to report.
    cluster.patch_set(
        "web",
        &json!({ "spec": { "injectionStrategy": { "paused": true } } }),
    );
    cluster.wait_set("web", "no condition", |set| injected_by_policy(set).is_null());
    cluster.plane.kubectl(&["delete", "sidecarset", "other"]).unwrap();
    cluster.wait_until("no policy is left", || {
        let left = versions(&cluster);
        if left.is_empty() {
            Ok(())
        } else {
            Err(format!("{left:?}"))
        }
    });

    // The gate switches policies off, and leaves the webhook.
    cluster.patch_set(
        "web",
        &json!({ "spec": { "injectionStrategy": { "paused": false } } }),
    );
    cluster.wait_injected_by("web", "True", "PolicyInstalled");
    cluster.restart_manager("without-policies", "SidecarSetPolicies=false");
    cluster.wait_set("web", "no condition", |set| injected_by_policy(set).is_null());
    assert_eq!(versions(&cluster), []);
    cluster.wait_dry_run("web", "injected by the webhook", |pod| {
        record(pod, "web")["updateTimestamp"].is_string()
    });
}

#[tokio::test]
async fn foreign_policy_of_the_same_name_is_left_alone() {
    let cluster = SidecarCluster::start("");
    if !cluster.serves_policies() {
        return;
    }
    let rule =
        json!({ "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"] });
    let expression = "[JSONPatch{op: 'add', path: '/metadata/labels/foreign', value: 'yes'}]";
    let foreign = json!({ "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicy",
        "metadata": { "name": "sidecarset-web", "labels": { "kruise.io/sidecarset-name": "web" } },
        "spec": { "failurePolicy": "Ignore", "reinvocationPolicy": "Never", "matchConstraints": { "resourceRules": [rule] },
            "mutations": [{ "patchType": "JSONPatch", "jsonPatch": { "expression": expression } }] } });
    cluster.plane.apply(&foreign.to_string()).unwrap();
    let before = cluster.get(POLICIES, "sidecarset-web").unwrap();
    cluster.create_set("web", json!({}));
    let condition = cluster.wait_injected_by("web", "False", "NameTaken");
    assert_eq!(
        condition["message"],
        "new Pods are injected by a webhook: MutatingAdmissionPolicy sidecarset-web exists, and this SidecarSet does not control it"
    );
    cluster.wait_dry_run("web", "injected by the webhook", |pod| {
        record(pod, "web")["updateTimestamp"].is_string()
    });
    let after = cluster.get(POLICIES, "sidecarset-web").unwrap();
    assert_eq!(
        after["metadata"]["resourceVersion"],
        before["metadata"]["resourceVersion"]
    );
    cluster
        .plane
        .kubectl(&["delete", POLICIES, "sidecarset-web"])
        .unwrap();
    cluster.wait_injected_by("web", "True", "PolicyInstalled");
}

/// The policy of the first set is not a foreign one, although no garbage collector has deleted it yet.
#[tokio::test]
async fn set_recreated_while_no_manager_runs_has_its_own_policy() {
    let (mut cluster, _webhooks) = SidecarCluster::start_separate();
    if !cluster.serves_policies() {
        return;
    }
    cluster.create_set("web", json!({}));
    cluster.wait_injected_by("web", "True", "PolicyInstalled");
    cluster.wait_dry_run("web", "the image", |pod| image(pod, "side-web") == "side:1");
    let before = cluster.get(POLICIES, "sidecarset-web").unwrap();
    cluster.manager.stop().unwrap();
    cluster.plane.kubectl(&["delete", "sidecarset", "web"]).unwrap();
    let set = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet", "metadata": { "name": "web" },
        "spec": { "selector": { "matchLabels": { "app": "web" } },
            "containers": [{ "name": "side-web", "image": "side:2" }] } });
    cluster.plane.apply(&set.to_string()).unwrap();
    cluster.manager.start().unwrap();
    cluster.wait_injected_by("web", "True", "PolicyInstalled");
    cluster.wait_dry_run("web", "the new image", |pod| image(pod, "side-web") == "side:2");
    let after = cluster.get(POLICIES, "sidecarset-web").unwrap();
    assert_ne!(after["metadata"]["uid"], before["metadata"]["uid"]);
    let owner = &after["metadata"]["ownerReferences"][0]["uid"];
    assert_eq!(
        *owner,
        cluster.get("sidecarset", "web").unwrap()["metadata"]["uid"]
    );
}

#[tokio::test]
async fn webhook_injects_without_the_role_for_policies() {
    let mut cluster = SidecarCluster::start("");
    if !cluster.serves_policies() {
        return;
    }
    cluster.manager.stop().unwrap();
    let role = "kruise-manager-injection-policies";
    cluster
        .plane
        .kubectl(&["delete", "clusterrolebinding", role])
        .unwrap();
    cluster.manager.start().unwrap();
    cluster.create_set("web", json!({}));
    let condition = cluster.wait_injected_by("web", "False", "PoliciesUnreadable");
    let message = condition["message"].as_str().unwrap();
    assert!(
        message.contains("cannot list MutatingAdmissionPolicies"),
        "{message}"
    );
    cluster.wait_dry_run("web", "injected by the webhook", |pod| {
        record(pod, "web")["updateTimestamp"].is_string()
    });
}
