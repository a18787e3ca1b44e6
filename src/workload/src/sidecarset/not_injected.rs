//! Which Pods slipped by: they run without the sidecars that they should have.
//!
//! A Pod that was created while no webhook answered is admitted without them, unless the set says otherwise
//! ([`kruise_api::keys::SIDECAR_SET_FAILURE_POLICY`]). So are Pods from before the set, from before a change of
//! selectors or labels, and from the time of a pause: none of them gets the sidecars until it is recreated.

use std::collections::BTreeMap;

use kruise_api::keys;
use kruise_api::pod_webhooks::is_excluded_namespace;

use super::matching::selects_new_pod;
use super::recorded::parse_injected_list;
use super::set::SetView;

/// A Pod, as far as its injection depends on it.
#[derive(Clone, Copy, Debug)]
pub struct InjectablePod<'a> {
    /// Its labels.
    pub labels: &'a BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: &'a BTreeMap<String, String>,
    /// Its namespace.
    pub namespace: &'a str,
    /// Labels of its Namespace; `None` if they are not known.
    pub namespace_labels: Option<&'a BTreeMap<String, String>>,
    /// Whether it has not ended and is not terminating.
    pub active: bool,
}

/// Whether the Pod lacks a set that it would get if it were created now. All of this must be so:
///
/// - The Pod is active, and does not list the set as injected.
/// - Its namespace has webhooks: it is none of [`kruise_api::pod_webhooks::excluded_namespaces`] of an installation in
///   `system_namespace`, and has no label [`kruise_api::pod_webhooks::EXCLUDED_NAMESPACE_LABEL`].
/// - The set selects the labels of the Pod and of its namespace, and its injection is not paused.
/// - No canary of the set, among `others`, does so too: the Pod would get that one instead.
///
/// If the labels of the namespace are not known, the answer is no.
#[must_use]
pub fn should_have_been_injected(
    set: &SetView<'_>,
    pod: &InjectablePod<'_>,
    others: &[SetView<'_>],
    system_namespace: &str,
) -> bool {
    let InjectablePod {
        labels,
        annotations,
        namespace,
        namespace_labels,
        active,
    } = *pod;
    let Some(namespace_labels) = namespace_labels else {
        return false;
    };
    let selects = |set: &SetView<'_>| selects_new_pod(set.spec, labels, Some(namespace_labels));
    let listed = annotations.get(keys::SIDECAR_SET_INJECTED_LIST);
    let mut canaries = others
        .iter()
        .filter(|other| other.canary_base() == Some(set.name));
    active
        && selects(set)
        && !is_excluded_namespace(namespace, namespace_labels, system_namespace)
        && !listed.is_some_and(|listed| parse_injected_list(listed).contains(set.name))
        && !canaries.any(selects)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use jiff::Timestamp;
    use kruise_api::pod_webhooks::EXCLUDED_NAMESPACE_LABEL;
    use kruise_api::sidecarset::SidecarSetSpec;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::sidecarset::inject::{Cluster, Options, inject};

    const SYSTEM: &str = "kruise-system";

    type Strings = BTreeMap<String, String>;

    fn strings(value: &Value) -> Strings {
        serde_json::from_value(value.clone()).unwrap()
    }

    struct Set {
        name: &'static str,
        annotations: Strings,
        spec: SidecarSetSpec,
    }

    impl Set {
        fn new(name: &'static str, annotations: &Value, strategy: &Value) -> Self {
            let spec = json!({ "selector": { "matchLabels": { "app": "web" } }, "injectionStrategy": strategy,
                "namespaceSelector": { "matchLabels": { "env": "prod" } },
                "containers": [{ "name": "log", "image": "log:1" }] });
            Self {
                name,
                annotations: strings(annotations),
                spec: serde_json::from_value(spec).unwrap(),
            }
        }

        fn canary(strategy: &Value) -> Self {
            let annotations = json!({ keys::SIDECAR_SET_CANARY: "true", keys::SIDECAR_SET_BASE: "s" });
            Self::new("canary", &annotations, strategy)
        }

        fn view(&self) -> SetView<'_> {
            SetView {
                name: self.name,
                resource_version: "1",
                annotations: &self.annotations,
                latest_revision: "s-1",
                spec: &self.spec,
            }
        }
    }

    struct Case {
        labels: Value,
        annotations: Value,
        namespace: &'static str,
        namespace_labels: Value,
        active: bool,
        strategy: Value,
        others: Vec<Set>,
    }

    impl Default for Case {
        /// A Pod that slipped by.
        fn default() -> Self {
            Self {
                labels: json!({ "app": "web" }),
                annotations: json!({}),
                namespace: "default",
                namespace_labels: json!({ "env": "prod" }),
                active: true,
                strategy: json!({}),
                others: Vec::new(),
            }
        }
    }

    impl Case {
        fn slipped_by(&self) -> bool {
            let (labels, annotations) = (strings(&self.labels), strings(&self.annotations));
            let known = !self.namespace_labels.is_null();
            let namespace_labels = known.then(|| strings(&self.namespace_labels));
            let pod = InjectablePod {
                labels: &labels,
                annotations: &annotations,
                namespace: self.namespace,
                namespace_labels: namespace_labels.as_ref(),
                active: self.active,
            };
            let set = Set::new("s", &json!({}), &self.strategy);
            let others: Vec<SetView<'_>> = self.others.iter().map(Set::view).collect();
            should_have_been_injected(&set.view(), &pod, &others, SYSTEM)
        }
    }

    #[test]
    #[rustfmt::skip]
    fn each_condition_counts() {
        let list = |names: &str| json!({ keys::SIDECAR_SET_INJECTED_LIST: names });
        let default = Case::default;
        let paused = json!({ "paused": true });
        for (what, case, expected) in [
            ("slipped by", default(), true),
            ("ended", Case { active: false, ..default() }, false),
            ("other labels", Case { labels: json!({ "app": "db" }), ..default() }, false),
            ("other namespace", Case { namespace_labels: json!({ "env": "dev" }), ..default() }, false),
            ("unknown namespace", Case { namespace_labels: json!(null), ..default() }, false),
            ("paused", Case { strategy: paused.clone(), ..default() }, false),
            ("injected", Case { annotations: list("a,s"), ..default() }, false),
            ("others injected", Case { annotations: list("a,s2"), ..default() }, true),
            ("ours", Case { namespace: SYSTEM, ..default() }, false),
            ("control plane", Case { namespace: "kube-system", ..default() }, false),
            (
                "label",
                Case { namespace_labels: json!({ "env": "prod", EXCLUDED_NAMESPACE_LABEL: "" }), ..default() },
                false,
            ),
            ("canary", Case { others: vec![Set::canary(&json!({}))], ..default() }, false),
            ("paused canary", Case { others: vec![Set::canary(&paused)], ..default() }, true),
            ("another set", Case { others: vec![Set::new("o", &json!({}), &json!({}))], ..default() }, true),
        ] {
            assert_eq!(case.slipped_by(), expected, "{what}");
        }
    }

    proptest! {
        /// A Pod that is created now lacks nothing afterwards, and one that lacks a set gets it.
        #[test]
        fn new_pod_gets_what_it_lacks(
            app in prop_oneof![Just("web"), Just("db")],
            env in prop_oneof![Just("prod"), Just("dev")],
            paused: bool,
            canary in prop::option::of(any::<bool>()),
        ) {
            let set = Set::new("s", &json!({}), &json!({ "paused": paused }));
            let canary = canary.map(|paused| Set::canary(&json!({ "paused": paused })));
            let sets: Vec<SetView<'_>> = [&set].into_iter().chain(&canary).map(Set::view).collect();
            let namespace_labels = strings(&json!({ "env": env }));
            let mut pod = json!({ "metadata": { "labels": { "app": app } }, "spec": { "containers": [] } });
            let lacks = |pod: &Value, set: &SetView<'_>| {
                let read = |field: &str| kruise_api::cloneset::string_map(&pod["metadata"][field]);
                let pod = InjectablePod {
                    labels: &read("labels"),
                    annotations: &read("annotations"),
                    namespace: "default",
                    namespace_labels: Some(&namespace_labels),
                    active: true,
                };
                should_have_been_injected(set, &pod, &sets, SYSTEM)
            };
            let before: Vec<bool> = sets.iter().map(|set| lacks(&pod, set)).collect();
            let cluster = Cluster { sets: &sets, namespace_labels: Some(&namespace_labels), revisions: &[] };
            let options = Options { sort_containers: false, now: Timestamp::UNIX_EPOCH };
            inject(&mut pod, "default", &cluster, &options, &mut || 0).unwrap();
            let listed = pod["metadata"]["annotations"][keys::SIDECAR_SET_INJECTED_LIST].as_str();
            let listed = parse_injected_list(listed.unwrap_or_default());
            for (set, before) in sets.iter().zip(before) {
                prop_assert!(!lacks(&pod, set));
                prop_assert_eq!(listed.contains(set.name), before, "{}", set.name);
            }
        }
    }
}
