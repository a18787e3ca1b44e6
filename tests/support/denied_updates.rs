//! Policies of the API server that deny updates in the namespace of a test.

use kube::api::{Api, DynamicObject, Patch, PatchParams};
use serde_json::json;

use super::clone_set_namespace::CloneSetNamespace;
use super::untyped::untyped;

/// Pods with this label may not be changed.
pub const LOCK_LABEL: &str = "example.com/locked";
/// Message of the denial.
pub const LOCK_MESSAGE: &str = "this Pod is locked";

fn policies(test: &CloneSetNamespace, kind: &str) -> Api<DynamicObject> {
    untyped(&test.admin, "admissionregistration.k8s.io", "v1", kind, None)
}

/// Creates the test's policy, named like its namespace, for updates of this resource or subresource there; it takes a
/// moment until it is enforced.
pub async fn deny_updates(test: &CloneSetNamespace, resource: &str, (expression, message): (&str, &str)) {
    let rule = json!({ "apiGroups": ["", "apps"], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": [resource] });
    let name = &test.namespace;
    let selector = json!({ "matchLabels": { "kubernetes.io/metadata.name": name } });
    let policy = json!({ "metadata": { "name": name }, "spec": {
        "failurePolicy": "Fail", "validations": [{ "expression": expression, "message": message }],
        "matchConstraints": { "resourceRules": [rule], "namespaceSelector": selector } } });
    test.create(&policies(test, "ValidatingAdmissionPolicy"), policy)
        .await;
    let binding = json!({ "metadata": { "name": name },
        "spec": { "policyName": name, "validationActions": ["Deny"] } });
    test.create(&policies(test, "ValidatingAdmissionPolicyBinding"), binding)
        .await;
}

/// Changes the policy to deny nothing.
pub async fn allow_updates(test: &CloneSetNamespace) {
    let always_true = Patch::Merge(json!({ "spec": { "validations": [{ "expression": "true" }] } }));
    policies(test, "ValidatingAdmissionPolicy")
        .patch(&test.namespace, &PatchParams::default(), &always_true)
        .await
        .unwrap();
}

/// A policy that denies every update of labelled Pods, except for their status.
pub async fn lock_pod(test: &CloneSetNamespace, pod: &str) {
    let unlocked = format!("!('{LOCK_LABEL}' in oldObject.metadata.?labels.orValue({{}}))");
    deny_updates(test, "pods", (&unlocked, LOCK_MESSAGE)).await;
    let label = Patch::Merge(json!({ "metadata": { "labels": { LOCK_LABEL: "yes" } } }));
    let params = PatchParams::default();
    test.pods().patch(pod, &params, &label).await.unwrap();
    let annotation = Patch::Merge(json!({ "metadata": { "annotations": { "example.com/probe": "x" } } }));
    let probe = PatchParams::default().dry_run();
    let in_effect = || async {
        test.pods()
            .patch(pod, &probe, &annotation)
            .await
            .is_err()
            .then_some(())
    };
    test.poll_until("the policy is in effect", in_effect).await;
}
