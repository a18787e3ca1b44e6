//! CloneSet where no webhook of ours answers: the schema and the policies alone.

use std::sync::LazyLock;

use kube::api::{Api, DynamicObject};
use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, wait};

use crate::cloneset::{BETA, set};
use crate::cloneset_mistakes as mistakes;
use crate::connect::connect;
use crate::world::{PATIENCE, create, install, refused, typed};

/// The policy, as the API server names who refuses.
const POLICY: &str = "ValidatingAdmissionPolicy 'kruise-cloneset-selector'";

/// An API server that knows our kinds and policies, and nobody who would answer for them.
static PLANE: LazyLock<ControlPlane> = LazyLock::new(|| {
    let plane = ControlPlane::start().unwrap();
    install(&plane, "crds");
    install(&plane, "policies");
    let foreign = set(BETA, "foreign", labels(json!({ "app": "b" })));
    wait::until("the policies are heeded", PATIENCE, || {
        let refused = plane.apply(&foreign.to_string()).err();
        if refused.is_none() {
            plane.kubectl(&["delete", "clone", "foreign"])?;
        }
        Ok(refused.filter(|why| why.to_string().contains(POLICY)).map(drop))
    })
    .unwrap();
    plane
});

async fn sets() -> Api<DynamicObject> {
    typed(
        &connect(PLANE.kubeconfig()).await,
        BETA,
        "CloneSet",
        Some("default"),
    )
}

/// Other labels of the template.
fn labels(labels: Value) -> Value {
    json!({ "template": { "metadata": { "labels": labels } } })
}

#[tokio::test]
async fn mistakes_are_refused_without_a_manager() {
    let sets = sets().await;
    for (change, message) in mistakes::all(BETA) {
        refused(create(&sets, set(BETA, "mistaken", change)).await, message);
    }
}

#[tokio::test]
async fn defaults_are_filled_in_without_a_manager() {
    let made = create(&sets().await, set(BETA, "filled-in", json!({})))
        .await
        .unwrap();
    assert_eq!(made["spec"]["replicas"], 1);
    assert_eq!(
        made["spec"]["updateStrategy"],
        json!({
            "type": "RollingUpdate",
            "rollingUpdate": { "podUpdatePolicy": "ReCreate", "partition": 0, "maxUnavailable": "20%", "maxSurge": 0 },
        })
    );
}

#[tokio::test]
async fn a_selector_has_to_find_the_pods_of_its_template_by_each_operator() {
    let sets = sets().await;
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
    for (at, (expressions, finds)) in cases.into_iter().enumerate() {
        for both in [false, true] {
            let labels = if both { json!({ "app": "a" }) } else { Value::Null };
            let selector = json!({ "matchLabels": labels, "matchExpressions": expressions });
            let name = format!("selects-{at}-{both}");
            let made = create(&sets, set(BETA, &name, json!({ "selector": selector }))).await;
            match finds {
                true => drop(made.unwrap_or_else(|why| panic!("{selector}: {why}"))),
                false => refused(made, POLICY),
            }
        }
    }
    refused(
        create(&sets, set(BETA, "foreign", labels(json!({ "app": "b" })))).await,
        POLICY,
    );
    refused(
        create(&sets, set(BETA, "foreign", labels(Value::Null))).await,
        POLICY,
    );
}
