//! CloneSet without our webhooks: only the schema and the policies.

use std::sync::LazyLock;

use kube::api::{Api, DynamicObject};
use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, wait};

use crate::cloneset::{BETA, cloneset};
use crate::cloneset_invalid as mistakes;
use crate::connect::connect;
use crate::webhook_cluster::{WAIT_TIMEOUT, assert_denied, create, dynamic_api, install};

/// The policy, as the API server names it in a denial.
const POLICY: &str = "ValidatingAdmissionPolicy 'kruise-cloneset-selector'";

/// An API server with our CRDs and policies, and no programs of ours.
static PLANE: LazyLock<ControlPlane> = LazyLock::new(|| {
    let plane = ControlPlane::start().unwrap();
    install(&plane, "crds");
    install(&plane, "policies");
    let foreign = cloneset(BETA, "foreign", template_labels(json!({ "app": "b" })));
    wait::until("the policies are heeded", WAIT_TIMEOUT, || {
        let refused = plane.apply(&foreign.to_string()).err();
        if refused.is_none() {
            plane.kubectl(&["delete", "clone", "foreign"])?;
        }
        Ok(refused.filter(|why| why.to_string().contains(POLICY)).map(drop))
    })
    .unwrap();
    plane
});

async fn cloneset_api() -> Api<DynamicObject> {
    dynamic_api(
        &connect(PLANE.kubeconfig()).await,
        BETA,
        "CloneSet",
        Some("default"),
    )
}

/// Changes the labels of the template.
fn template_labels(labels: Value) -> Value {
    json!({ "template": { "metadata": { "labels": labels } } })
}

#[tokio::test]
async fn invalid_clonesets_are_rejected_without_a_manager() {
    let sets = cloneset_api().await;
    for (change, message) in mistakes::invalid_specs(BETA) {
        assert_denied(create(&sets, cloneset(BETA, "mistaken", change)).await, message);
    }
}

#[tokio::test]
async fn defaults_are_set_without_a_manager() {
    let result = create(&cloneset_api().await, cloneset(BETA, "filled-in", json!({})))
        .await
        .unwrap();
    assert_eq!(result["spec"]["replicas"], 1);
    assert_eq!(
        result["spec"]["updateStrategy"],
        json!({
            "type": "RollingUpdate",
            "rollingUpdate": { "podUpdatePolicy": "ReCreate", "partition": 0, "maxUnavailable": "20%", "maxSurge": 0 },
        })
    );
}

#[tokio::test]
async fn selector_must_match_template_labels_for_each_operator() {
    let sets = cloneset_api().await;
    let expression = |key: &str, operator: &str, values: &[&str]| {
        let mut one = json!({ "key": key, "operator": operator });
        if !values.is_empty() {
            one["values"] = json!(values);
        }
        one
    };
    // The template has label `app: a`.
    let cases = [
        (vec![expression("app", "In", &["b", "a"])], true),
        (vec![expression("app", "In", &["b"])], false),
        (vec![expression("tier", "In", &["a"])], false),
        (vec![expression("app", "NotIn", &["b"])], true),
        (vec![expression("tier", "NotIn", &["a"])], true),
        (vec![expression("app", "NotIn", &["b", "a"])], false),
        (vec![expression("app", "Exists", &[])], true),
        (vec![expression("tier", "Exists", &[])], false),
        (vec![expression("tier", "DoesNotExist", &[])], true),
        (vec![expression("app", "DoesNotExist", &[])], false),
        (
            vec![expression("app", "In", &["a"]), expression("tier", "Exists", &[])],
            false,
        ),
    ];
    for (index, (expressions, matches)) in cases.into_iter().enumerate() {
        for both in [false, true] {
            let labels = if both { json!({ "app": "a" }) } else { Value::Null };
            let selector = json!({ "matchLabels": labels, "matchExpressions": expressions });
            let name = format!("selects-{index}-{both}");
            let result = create(&sets, cloneset(BETA, &name, json!({ "selector": selector }))).await;
            match matches {
                true => drop(result.unwrap_or_else(|why| panic!("{selector}: {why}"))),
                false => assert_denied(result, POLICY),
            }
        }
    }
    assert_denied(
        create(
            &sets,
            cloneset(BETA, "foreign", template_labels(json!({ "app": "b" }))),
        )
        .await,
        POLICY,
    );
    assert_denied(
        create(&sets, cloneset(BETA, "foreign", template_labels(Value::Null))).await,
        POLICY,
    );
}
