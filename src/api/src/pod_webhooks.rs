//! Webhooks for new Pods, built from the SidecarSets that there are.
//!
//! Each set has a webhook with its own selectors, so that the API server sends only Pods that a set matches, and none
//! when there is no set. The first one that is called injects every set that matches; match conditions then keep the
//! Pod from the others.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use serde_json::{Value, json};

use super::selector::{disjoint, is_empty};
use super::sidecarset::SidecarSetSpec;
use super::validation::{FieldErrors, selector};
use super::webhooks::client_config;
use super::{GROUP, cel, keys, names};

/// Webhooks of single sets. The API server evaluates the selectors of all of them for each new Pod.
const MAX_WEBHOOKS: usize = 100;
/// Bytes of their JSON: a configuration of 1.5 MiB can be stored, and each webhook also has a CA of some 1.5 KiB.
const MAX_BYTES: usize = 512 << 10;
/// Canaries of one set that its condition names.
const MAX_CANARIES: usize = 64;
/// Characters of the condition of a shared webhook; the API server takes 100,000.
const MAX_CONDITION_CHARS: usize = 64 << 10;
/// Seconds in which each webhook must answer.
const MAX_TIMEOUT: usize = 5;
/// Seconds that a Pod waits at most for all webhooks with policy `Ignore`, which the API server calls one after the other:
/// the CloneSet controller waits 10 s for a creation, and the API server ends a request after 34 s.
const MAX_FAIL_OPEN_SECONDS: usize = 8;
/// The failure policy with which a Pod is created although its webhook does not answer.
const IGNORE: &str = "Ignore";

/// The webhook of one set.
#[derive(Clone, Debug, PartialEq)]
pub struct SetWebhook {
    name: String,
    /// The set that this one replaces for some Pods.
    canary_of: Option<String>,
    /// CEL: that the Pod has a container of the set.
    has_container: String,
    failure_policy: &'static str,
    /// Whether the set has a policy, so that the webhook is called only for Pods at which that failed.
    has_policy: bool,
    /// CEL: whether the set selects the Pod by its labels.
    selects: String,
    pods: LabelSelector,
    namespaces: Option<LabelSelector>,
    webhook: Value,
}

impl SetWebhook {
    /// The webhook of a set, for an installation in `namespace`. `None` if the set injects nothing: it is paused, selects
    /// nothing, or has selectors that the API server would refuse, and every other webhook with them.
    #[must_use]
    pub fn new(
        namespace: &str,
        name: &str,
        annotations: Option<&BTreeMap<String, String>>,
        spec: &SidecarSetSpec,
    ) -> Option<Self> {
        let selectors = PodSelectors::new(namespace, spec).ok()??;
        let selector = spec.selector.as_ref()?;
        let valid = names::is_label(name);
        let failure_policy = failure_policy(annotations);
        let has_container = has_container(spec);
        valid.then(|| Self {
            name: name.to_owned(),
            canary_of: annotations.and_then(canary_base).map(str::to_owned),
            failure_policy,
            has_policy: false,
            selects: cel::matches(selector, cel::LABELS),
            pods: selector.clone(),
            namespaces: spec.namespace_selector.clone(),
            webhook: webhook(
                namespace,
                name,
                &format!("{}/{name}", keys::MUTATE_POD_PATH),
                failure_policy,
                &selectors.namespaces,
                Some((
                    selectors.objects,
                    (NOT_INJECTED, not_injected(&[(name, has_container.as_str())])),
                )),
            ),
            has_container,
        })
    }

    /// The webhook of a set with these canaries, each with its condition: a Pod that got one of them needs no call.
    fn with_canaries(&self, canaries: &BTreeSet<(&str, &str)>) -> Value {
        let mut webhook = self.webhook.clone();
        if !canaries.is_empty() {
            let canaries = canaries.iter().take(MAX_CANARIES).copied();
            let own = (self.name.as_str(), self.has_container.as_str());
            let sets: Vec<(&str, &str)> = std::iter::once(own).chain(canaries).collect();
            let condition = json!([{ "name": NOT_INJECTED, "expression": not_injected(&sets) }]);
            super::json::set(&mut webhook, &["matchConditions"], condition);
        }
        webhook
    }

    fn is_fail_open(&self) -> bool {
        self.failure_policy == IGNORE
    }

    /// Whether some Pod may be sent to both webhooks.
    fn overlaps(&self, other: &Self) -> bool {
        let namespaces = self.namespaces.as_ref().zip(other.namespaces.as_ref());
        !disjoint(&self.pods, &other.pods) && !namespaces.is_some_and(|(one, other)| disjoint(one, other))
    }

    /// The webhook of a set that has a policy or not.
    #[must_use]
    pub fn with_policy(self, has_policy: bool) -> Self {
        Self { has_policy, ..self }
    }
}

/// Which new Pods a set injects, as configurations of admission have it.
#[derive(Clone, Debug, PartialEq)]
pub struct PodSelectors {
    /// Label selector for the Pods.
    pub objects: Value,
    /// Label selector for their Namespaces; not those of the control plane and our own.
    pub namespaces: Value,
}

impl PodSelectors {
    /// The selectors of a set, for an installation in `namespace`. `None` if the set injects nothing: it is paused, or
    /// selects nothing.
    ///
    /// # Errors
    ///
    /// If the API server would refuse a selector, and the whole configuration with it.
    pub fn new(namespace: &str, spec: &SidecarSetSpec) -> Result<Option<Self>, FieldErrors> {
        let paused = spec.is_injection_paused();
        let selector = spec.selector.as_ref();
        let Some(selector) = selector.filter(|selector| !paused && !is_empty(selector)) else {
            return Ok(None);
        };
        let objects = json!(without_empty_lists(selector));
        let namespaces = spec.namespace_selector.as_ref();
        let mut namespaces = json!(namespaces.map(without_empty_lists).unwrap_or_default());
        let mut errors = FieldErrors::default();
        selector::check(&objects, "spec.selector", &mut errors);
        selector::check(&namespaces, "spec.namespaceSelector", &mut errors);
        if !errors.is_empty() {
            return Err(errors);
        }
        exclude_system_namespaces(&mut namespaces, namespace);
        Ok(Some(Self { objects, namespaces }))
    }
}

/// As the API server stores a selector in a configuration: with empty lists, ours would always differ from it.
fn without_empty_lists(selector: &LabelSelector) -> LabelSelector {
    let LabelSelector {
        match_labels,
        match_expressions,
    } = selector.clone();
    let expressions = match_expressions.into_iter().flatten().map(|one| {
        let values = one.values.filter(|values| !values.is_empty());
        LabelSelectorRequirement { values, ..one }
    });
    let expressions: Vec<_> = expressions.collect();
    LabelSelector {
        match_labels: match_labels.filter(|labels| !labels.is_empty()),
        match_expressions: Some(expressions).filter(|expressions| !expressions.is_empty()),
    }
}

/// `Fail` if the annotation of a set says so, else `Ignore`.
#[must_use]
pub fn failure_policy(annotations: Option<&BTreeMap<String, String>>) -> &'static str {
    let annotated = annotations.and_then(|all| all.get(keys::SIDECAR_SET_FAILURE_POLICY));
    match annotated.map(String::as_str) {
        Some("Fail") => "Fail",
        _ => IGNORE,
    }
}

/// Name of the condition of a set's webhook.
const NOT_INJECTED: &str = "not-injected";

/// The set that the one with these annotations replaces for some Pods, if it is a canary.
#[must_use]
pub fn canary_base(annotations: &BTreeMap<String, String>) -> Option<&str> {
    let is_canary = annotations
        .get(keys::SIDECAR_SET_CANARY)
        .is_some_and(|value| value == keys::TRUE);
    let base = annotations.get(keys::SIDECAR_SET_BASE).filter(|_| is_canary);
    base.map(String::as_str)
}

/// CEL: whether the Pod lacks all of these sets, each with its condition. The annotation alone does not count, because any
/// user may write it.
fn not_injected(sets: &[(&str, &str)]) -> String {
    let list = keys::SIDECAR_SET_INJECTED_LIST;
    // A canary mostly has the containers of its base.
    let mut by_condition: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for &(set, has_container) in sets {
        by_condition.entry(has_container).or_default().push(set);
    }
    let injected = by_condition.into_iter().map(|(has_container, sets)| {
        let is_one = match sets.as_slice() {
            [set] => format!("s == '{set}'"),
            sets => format!("s in ['{}']", sets.join("', '")),
        };
        format!(
            "object.metadata.?annotations['{list}'].orValue('').split(',').exists(s, {is_one}){has_container}"
        )
    });
    let injected: Vec<String> = injected.collect();
    format!("!({})", injected.join(" || "))
}

/// CEL, behind another condition: whether the Pod has a container of the set.
fn has_container(spec: &SidecarSetSpec) -> String {
    let lists = [
        ("object.spec.containers", &spec.containers),
        ("object.spec.?initContainers.orValue([])", &spec.init_containers),
    ];
    let mut containers = lists.into_iter().flat_map(|(list, containers)| {
        containers
            .iter()
            .flatten()
            .map(move |container| (list, container))
    });
    // One container is proof enough, and keeps the expression short.
    let first = containers.find_map(|(list, container)| {
        let name = container.container.get("name")?.as_str();
        Some((list, name.filter(|name| names::is_label(name))?))
    });
    first.map_or_else(String::new, |(list, name)| {
        format!(" && {list}.exists(c, c.name in ['{name}', '{name}-1'])")
    })
}

/// End of the names of all these webhooks.
pub const NAME_SUFFIX: &str = ".mpod.kb.io";

fn webhook_name(set: &str) -> String {
    format!("{set}{NAME_SUFFIX}")
}

/// The webhooks of the configuration: in the order of their sets, and then `for_all`, which have policy `Ignore`.
///
/// Beyond the limits, sets with a policy have none, and the others share one that gets the Pods with labels that one of
/// them selects, or all Pods if that is too long to write. Sets with policy `Ignore` also share it if their webhooks could
/// delay a Pod for too long.
#[must_use]
pub fn pod_webhooks<'a>(
    namespace: &str,
    sets: impl IntoIterator<Item = &'a SetWebhook>,
    for_all: Vec<Value>,
) -> Vec<Value> {
    let mut sets: Vec<_> = sets.into_iter().collect();
    let name = |webhook: &Value| webhook["name"].as_str().unwrap_or_default().to_owned();
    sets.sort_by_key(|set| (set.has_policy, name(&set.webhook)));
    let canaries = canaries(&sets);
    let none = BTreeSet::new();
    let (mut webhooks, mut bytes, mut shared) = (Vec::new(), 0, Shared::new());
    // The most webhooks with policy `Ignore` that one Pod may be sent to; one is the shared one.
    let max_fail_open = MAX_FAIL_OPEN_SECONDS.saturating_sub(for_all.len() + 1);
    let (mut fail_open, mut most_fail_open) = (Vec::<&SetWebhook>::new(), 0);
    for (position, set) in sets.into_iter().enumerate() {
        let webhook = set.with_canaries(canaries.get(set.name.as_str()).unwrap_or(&none));
        bytes += webhook.to_string().len();
        let is_within_limits = position < MAX_WEBHOOKS && bytes <= MAX_BYTES;
        let mut has_own = is_within_limits;
        if is_within_limits && set.is_fail_open() {
            // All that one Pod is sent to overlap, so the last of them has counted them all.
            let overlapping = 1 + fail_open.iter().filter(|other| other.overlaps(set)).count();
            has_own = overlapping <= max_fail_open;
            if has_own {
                fail_open.push(set);
                most_fail_open = most_fail_open.max(overlapping);
            }
        }
        if has_own {
            webhooks.push(webhook);
        } else if !set.has_policy {
            shared
                .entry(set.failure_policy)
                .or_default()
                .insert(set.selects.clone());
        } else if is_within_limits {
            add_fallback(&mut shared, set, &webhook);
        }
    }
    webhooks.sort_by_key(name);
    let fail_open = most_fail_open + for_all.len() + usize::from(shared.contains_key(IGNORE));
    webhooks.extend(shared_webhooks(namespace, shared));
    webhooks.extend(for_all);
    limit_delay(&mut webhooks, fail_open);
    webhooks
}

/// The canaries of each set, each with its condition.
fn canaries<'a>(sets: &[&'a SetWebhook]) -> BTreeMap<&'a str, BTreeSet<(&'a str, &'a str)>> {
    let mut canaries: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for set in sets {
        if let Some(base) = &set.canary_of {
            let canary = (set.name.as_str(), set.has_container.as_str());
            canaries.entry(base.as_str()).or_default().insert(canary);
        }
    }
    canaries
}

/// CEL, by failure policy: which Pods the sets without a webhook of their own select.
type Shared = BTreeMap<&'static str, BTreeSet<String>>;

fn condition_chars(selects: &BTreeSet<String>) -> usize {
    selects.iter().map(|one| one.len() + " || ".len()).sum()
}

/// Adds a set with a policy, for the Pods at which that failed. It is left out rather than that all Pods are sent.
fn add_fallback(shared: &mut Shared, set: &SetWebhook, webhook: &Value) {
    let not_injected = webhook["matchConditions"][0]["expression"].as_str();
    let condition = format!("{} && {}", set.selects, not_injected.unwrap_or("true"));
    let chars = shared.get(set.failure_policy).map_or(0, condition_chars);
    if chars + condition.len() < MAX_CONDITION_CHARS {
        shared.entry(set.failure_policy).or_default().insert(condition);
    }
}

fn shared_webhooks(namespace: &str, shared: Shared) -> impl Iterator<Item = Value> {
    let mut namespaces = json!({});
    exclude_system_namespaces(&mut namespaces, namespace);
    shared.into_iter().map(move |(policy, selects)| {
        // No set has a name with a dot.
        let name = format!("others.{}", policy.to_ascii_lowercase());
        let short = condition_chars(&selects) <= MAX_CONDITION_CHARS;
        let selected = selects.into_iter().collect::<Vec<_>>().join(" || ");
        let own = short.then(|| (json!({}), ("selected", selected)));
        webhook(namespace, &name, keys::MUTATE_POD_PATH, policy, &namespaces, own)
    })
}

/// Gives each webhook with policy `Ignore` its part of the time; a Pod is sent to at most `fail_open` of them.
fn limit_delay(webhooks: &mut [Value], fail_open: usize) {
    let timeout = (MAX_FAIL_OPEN_SECONDS / fail_open.max(1)).clamp(1, MAX_TIMEOUT);
    for webhook in webhooks.iter_mut().filter(|one| one["failurePolicy"] == IGNORE) {
        super::json::set(webhook, &["timeoutSeconds"], json!(timeout));
    }
}

/// The webhook for Pods with launch priorities, whether a set selects them or not, unless each container has its barrier:
/// those of a sidecar that a policy has injected are missing, and those of a Pod that was copied from another one are the
/// other's. A restored Pod that was completed has no ConfigMap any more.
#[must_use]
pub fn launch_priority_webhook(namespace: &str) -> Value {
    let ordered = format!(
        "object.metadata.?annotations['{}'].orValue('') == '{}'",
        keys::CONTAINER_LAUNCH_PRIORITY,
        keys::CONTAINER_LAUNCH_ORDERED
    );
    let prioritized = format!(
        "object.spec.containers.exists(c, c.?env.orValue([]).exists(e, e.name == '{}'))",
        keys::ENV_CONTAINER_PRIORITY
    );
    // Without a name, which is generated later, no barrier is that of the Pod.
    let blocked = format!(
        "object.metadata.?name.orValue('') != '' && object.spec.containers.all(c, c.?env.orValue([]).exists(e, \
         e.name == '{}' && e.?valueFrom.?configMapKeyRef.?name.orValue('') == object.metadata.name + '{}'))",
        keys::ENV_CONTAINER_BARRIER,
        keys::BARRIER_CONFIG_MAP_SUFFIX
    );
    let completed = format!(
        "'{}' in object.metadata.?annotations.orValue({{}})",
        keys::CONTAINER_LAUNCH_COMPLETED
    );
    let condition = format!(
        "object.spec.containers.size() > 1 && ({ordered} || {prioritized}) && (!({blocked}) || {completed})"
    );
    all_pods_webhook(namespace, "launch.priority", ("launch-priority", condition))
}

/// The webhook for Pods without readiness gate `KruisePodReady` (gate `KruisePodReadinessGate`).
#[must_use]
pub fn readiness_gate_webhook(namespace: &str) -> Value {
    let present = format!(
        "object.spec.?readinessGates.orValue([]).exists(g, g.conditionType == '{}')",
        keys::KRUISE_POD_READY
    );
    all_pods_webhook(namespace, "readiness.gate", ("no-gate", format!("!{present}")))
}

/// The webhook for Pods whose liveness probes the daemon runs (gate `EnhancedLivenessProbe`).
#[must_use]
pub fn enhanced_liveness_webhook(namespace: &str) -> Value {
    let annotated = format!(
        "object.metadata.?annotations['{}'].orValue('') == '{}'",
        keys::USING_ENHANCED_LIVENESS,
        keys::TRUE
    );
    let owned = format!(
        "object.metadata.?ownerReferences.orValue([]).exists(o, o.?controller.orValue(false) \
         && o.apiVersion.startsWith('{GROUP}/'))"
    );
    let present = "object.spec.containers.exists(c, has(c.livenessProbe))";
    let condition = format!("{annotated} && {owned} && {present}");
    all_pods_webhook(namespace, "enhanced.liveness", ("enhanced-liveness", condition))
}

/// The most namespaces that a condition lists; its costs are limited.
const MAX_LISTED_NAMESPACES: usize = 64;

/// Name of [`virtual_node_probes_webhook`], without [`NAME_SUFFIX`].
pub const VIRTUAL_NODE_PROBES: &str = "podprobe.marker";

/// The webhook for Pods that get the probes of PodProbeMarkers in an annotation, whose namespaces these are (gate
/// `EnablePodProbeMarkerOnServerless`).
#[must_use]
pub fn virtual_node_probes_webhook(namespace: &str, with_markers: &BTreeSet<String>) -> Value {
    let listed = with_markers
        .iter()
        .filter(|name| names::is_label(name))
        .map(|name| format!("'{name}'"));
    let condition = if with_markers.len() > MAX_LISTED_NAMESPACES {
        "true".to_owned()
    } else {
        format!("request.namespace in [{}]", listed.collect::<Vec<_>>().join(", "))
    };
    all_pods_webhook(namespace, VIRTUAL_NODE_PROBES, ("has-markers", condition))
}

/// A webhook for the Pods of all namespaces that webhooks see, if the condition holds. No set has a name with a dot, so
/// the path says that no set is the reason for the call.
fn all_pods_webhook(namespace: &str, name: &str, condition: (&str, String)) -> Value {
    let mut namespaces = json!({});
    exclude_system_namespaces(&mut namespaces, namespace);
    let own = Some((json!({}), condition));
    let path = format!("{}/{name}", keys::MUTATE_POD_PATH);
    webhook(namespace, name, &path, IGNORE, &namespaces, own)
}

/// Label of the namespaces whose Pods have no webhooks, whatever its value, as in upstream.
pub const EXCLUDED_NAMESPACE_LABEL: &str = "control-plane";

/// The namespaces whose Pods have no webhooks, for an installation in `namespace`: Pods of the control plane and our
/// own must start without us.
#[must_use]
pub const fn excluded_namespaces(namespace: &str) -> [&str; 4] {
    [
        namespace,
        keys::DAEMON_CONFIG_NAMESPACE,
        "kube-system",
        "kube-node-lease",
    ]
}

/// Whether the Pods of the namespace `name`, with these labels, have no webhooks, for an installation in `namespace`.
#[must_use]
pub fn is_excluded_namespace(name: &str, labels: &BTreeMap<String, String>, namespace: &str) -> bool {
    excluded_namespaces(namespace).contains(&name) || labels.contains_key(EXCLUDED_NAMESPACE_LABEL)
}

fn exclude_system_namespaces(selector: &mut Value, namespace: &str) {
    let mut expressions = selector["matchExpressions"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let own = excluded_namespaces(namespace);
    expressions.push(json!({ "key": keys::NAMESPACE_NAME, "operator": "NotIn", "values": own }));
    expressions.push(json!({ "key": EXCLUDED_NAMESPACE_LABEL, "operator": "DoesNotExist" }));
    super::json::set(selector, &["matchExpressions"], expressions.into());
}

/// The rules of admission that new Pods match.
#[must_use]
pub fn new_pods() -> Value {
    json!([{
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods"],
        "scope": "Namespaced",
    }])
}

/// A webhook that is called at `path`; `own` are the selector and the condition for the Pods that it is for.
fn webhook(
    namespace: &str,
    set: &str,
    path: &str,
    failure_policy: &str,
    namespaces: &Value,
    own: Option<(Value, (&str, String))>,
) -> Value {
    let mut webhook = json!({
        "name": webhook_name(set),
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": failure_policy,
        "matchPolicy": "Equivalent",
        "reinvocationPolicy": "Never",
        "timeoutSeconds": MAX_TIMEOUT,
        "clientConfig": client_config(namespace, path),
        "namespaceSelector": namespaces,
        "objectSelector": {},
        "rules": new_pods(),
    });
    if let Some((object_selector, (name, expression))) = own {
        super::json::set(&mut webhook, &["objectSelector"], object_selector);
        let condition = json!([{ "name": name, "expression": expression }]);
        super::json::set(&mut webhook, &["matchConditions"], condition);
    }
    webhook
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn spec(value: Value) -> SidecarSetSpec {
        let mut spec =
            json!({ "selector": { "matchLabels": { "app": "web" } }, "containers": [{ "name": "log" }] });
        for (field, value) in value.as_object().unwrap() {
            super::super::json::set(&mut spec, &[field], value.clone());
        }
        serde_json::from_value(spec).unwrap()
    }

    fn webhooks(specs: &[(&str, SidecarSetSpec)]) -> Vec<Value> {
        let sets = specs
            .iter()
            .filter_map(|(name, spec)| SetWebhook::new("kruise-system", name, None, spec));
        pod_webhooks("kruise-system", &sets.collect::<Vec<_>>(), Vec::new())
    }

    fn fails_closed() -> BTreeMap<String, String> {
        BTreeMap::from([(keys::SIDECAR_SET_FAILURE_POLICY.to_owned(), "Fail".to_owned())])
    }

    fn names(webhooks: &[Value]) -> Vec<&str> {
        webhooks
            .iter()
            .map(|webhook| webhook["name"].as_str().unwrap())
            .collect()
    }

    #[test]
    fn only_sets_that_inject_have_a_webhook() {
        let webhooks = webhooks(&[
            ("paused", spec(json!({ "injectionStrategy": { "paused": true } }))),
            ("nothing", spec(json!({ "selector": {} }))),
            ("b", spec(json!({}))),
            (
                "refused",
                spec(json!({ "selector": { "matchLabels": { "a b": "c" } } })),
            ),
            (
                "refused-too",
                spec(
                    json!({ "namespaceSelector": { "matchExpressions": [{ "key": "a", "operator": "?" }] } }),
                ),
            ),
            ("a", spec(json!({}))),
        ]);
        assert_eq!(names(&webhooks), ["a.mpod.kb.io", "b.mpod.kb.io"]);
    }

    #[test]
    fn webhook_has_the_selectors_of_its_set() {
        let expression = json!({ "key": "env", "operator": "In", "values": ["prod"] });
        let namespaces = json!({ "matchLabels": { "team": "x" }, "matchExpressions": [expression] });
        let all = webhooks(&[("s", spec(json!({ "namespaceSelector": namespaces })))]);
        assert_eq!(
            all[0]["objectSelector"],
            json!({ "matchLabels": { "app": "web" } })
        );
        let namespaces = &all[0]["namespaceSelector"];
        assert_eq!(namespaces["matchLabels"], json!({ "team": "x" }));
        assert_eq!(namespaces["matchExpressions"][0], expression);
        let excluded = namespaces["matchExpressions"][1]["values"].as_array().unwrap();
        assert!(
            ["kruise-system", "kube-system"]
                .iter()
                .all(|n| excluded.contains(&json!(n)))
        );
        assert_eq!(all[0]["failurePolicy"], "Ignore");
        let set = SetWebhook::new("n", "s", Some(&fails_closed()), &spec(json!({}))).unwrap();
        assert_eq!(pod_webhooks("n", [&set], Vec::new())[0]["failurePolicy"], "Fail");
    }

    #[test]
    fn empty_lists_are_as_none() {
        let selectors = |selector: Value, namespaces: Value| {
            let set = spec(json!({ "selector": selector, "namespaceSelector": namespaces }));
            PodSelectors::new("n", &set).unwrap().unwrap()
        };
        let key = json!({ "key": "a", "operator": "Exists" });
        let key_of_none = json!({ "key": "a", "operator": "Exists", "values": [] });
        assert_eq!(
            selectors(
                json!({ "matchLabels": {}, "matchExpressions": [key_of_none] }),
                json!({ "matchLabels": {}, "matchExpressions": [] }),
            ),
            selectors(json!({ "matchExpressions": [key] }), json!({})),
        );
        let labels = json!({ "matchLabels": { "a": "b" } });
        let mut with_empty = labels.clone();
        with_empty["matchExpressions"] = json!([]);
        assert_eq!(
            selectors(with_empty.clone(), with_empty),
            selectors(labels.clone(), labels)
        );
    }

    /// A Pod that got a canary needs no call for the set that it replaces, which may have policy `Fail`.
    #[test]
    fn canary_counts_as_its_base() {
        let annotations = BTreeMap::from([
            (keys::SIDECAR_SET_CANARY.to_owned(), keys::TRUE.to_owned()),
            (keys::SIDECAR_SET_BASE.to_owned(), "mesh".to_owned()),
        ]);
        let set = |name, annotations, patch| SetWebhook::new("n", name, annotations, &spec(patch)).unwrap();
        let (base, canary) = (
            set("mesh", None, json!({})),
            set("new", Some(&annotations), json!({})),
        );
        let expressions = |sets: &[&SetWebhook]| -> Vec<String> {
            let webhooks = pod_webhooks("n", sets.iter().copied(), Vec::new());
            let expression = |webhook: &Value| webhook["matchConditions"][0]["expression"].clone();
            let texts = webhooks.iter().map(expression);
            texts.map(|text| text.as_str().unwrap().to_owned()).collect()
        };
        let both = expressions(&[&base, &canary]);
        assert!(both[0].contains("s in ['mesh', 'new']"), "{both:?}");
        assert!(both[1].contains("s == 'new'"), "{both:?}");
        assert!(expressions(&[&base])[0].contains("s == 'mesh'"));

        let other = json!({ "containers": [{ "name": "other" }] });
        let canary = set("new", Some(&annotations), other);
        let of_base = &expressions(&[&base, &canary])[0];
        for (set, container) in [("mesh", "log"), ("new", "other")] {
            let both = format!(
                "exists(s, s == '{set}') && object.spec.containers.exists(c, c.name in ['{container}', '{container}-1'])"
            );
            assert!(of_base.contains(&both), "{of_base}");
        }
        assert!(of_base.contains(" || "), "{of_base}");
    }

    /// What the API server does with the selector of a webhook, and what we expect of it.
    #[test]
    fn excluded_namespaces_are_those_that_the_selector_leaves_out() {
        let mut selector = json!({});
        exclude_system_namespaces(&mut selector, "k");
        let selector: LabelSelector = serde_json::from_value(selector).unwrap();
        for (name, label) in [
            ("k", false),
            ("kube-system", false),
            (keys::DAEMON_CONFIG_NAMESPACE, false),
            ("kruise-system", false),
            ("default", false),
            ("default", true),
        ] {
            let mut labels = BTreeMap::from([(keys::NAMESPACE_NAME.to_owned(), name.to_owned())]);
            if label {
                labels.insert(EXCLUDED_NAMESPACE_LABEL.to_owned(), String::new());
            }
            let selected = super::super::selector::matches(&selector, &labels);
            assert_eq!(
                is_excluded_namespace(name, &labels, "k"),
                !selected,
                "{name} {label}"
            );
        }
    }

    #[test]
    fn webhooks_are_called_at_the_path_of_their_set() {
        let all = webhooks(&[("a", spec(json!({})))]);
        assert_eq!(all[0]["clientConfig"]["service"]["path"], "/mutate-pod/a");
        let for_all_pods = [
            launch_priority_webhook("n"),
            readiness_gate_webhook("n"),
            enhanced_liveness_webhook("n"),
        ];
        for webhook in &for_all_pods {
            let path = format!(
                "/mutate-pod/{}",
                webhook["name"].as_str().unwrap().trim_end_matches(NAME_SUFFIX)
            );
            assert_eq!(webhook["clientConfig"]["service"]["path"], *path);
            assert_eq!(webhook["failurePolicy"], "Ignore");
        }
        for webhook in all.iter().chain(&for_all_pods) {
            // Every new Pod waits that long for a program that does not answer.
            let timeout = webhook["timeoutSeconds"].as_u64();
            assert!(timeout.is_some_and(|seconds| seconds <= 5), "{webhook}");
        }
    }

    /// The API server decides with it, in the tests of injection.
    #[test]
    fn barriers_count_only_for_the_pod_that_they_are_named_after() {
        let webhook = launch_priority_webhook("n");
        let condition = webhook["matchConditions"][0]["expression"].as_str().unwrap();
        for part in [
            "?configMapKeyRef.?name.orValue('') == object.metadata.name + '-barrier'",
            "!(object.metadata.?name.orValue('') != '' && ",
            " || 'apps.kruise.io/container-launch-priority-completed' in object.metadata.?annotations.orValue({}))",
        ] {
            assert!(condition.contains(part), "{condition}");
        }
    }

    #[test]
    fn annotation_alone_keeps_no_pod_from_the_webhook() {
        let condition = |spec_patch: Value| {
            let all = webhooks(&[("s", spec(spec_patch))]);
            all[0]["matchConditions"][0]["expression"]
                .as_str()
                .unwrap()
                .to_owned()
        };
        let native = json!([{ "name": "mesh", "restartPolicy": "Always" }]);
        for (patch, present) in [
            (
                json!({ "initContainers": native }),
                " && object.spec.containers.exists(c, c.name in ['log', 'log-1']))",
            ),
            (
                json!({ "containers": [], "initContainers": native }),
                " && object.spec.?initContainers.orValue([]).exists(c, c.name in ['mesh', 'mesh-1']))",
            ),
        ] {
            let condition = condition(patch);
            assert!(condition.ends_with(present), "{condition}");
        }
    }

    #[test]
    fn names_that_are_no_names_stay_out_of_expressions() {
        let hostile = json!({ "containers": [{ "name": "x') || true || ('" }] });
        let all = webhooks(&[("s", spec(hostile))]);
        let expression = all[0]["matchConditions"][0]["expression"].as_str().unwrap();
        assert!(!expression.contains("true"), "{expression}");
        assert!(webhooks(&[("s' || true || '", spec(json!({})))]).is_empty());
    }

    #[test]
    fn sets_beyond_the_limits_share_a_webhook() {
        let names_of_sets: Vec<_> = (0..300).map(|n| format!("s{n:03}")).collect();
        let all_with = |spec: &SidecarSetSpec, with_policy: &dyn Fn(&str) -> bool| {
            let sets = names_of_sets.iter().map(|name| {
                let set = SetWebhook::new("kruise-system", name, Some(&fails_closed()), spec);
                set.unwrap().with_policy(with_policy(name))
            });
            pod_webhooks("kruise-system", &sets.collect::<Vec<_>>(), Vec::new())
        };
        let spec_of_all = spec(json!({}));
        let all = all_with(&spec_of_all, &|_| false);
        assert_eq!(all.len(), MAX_WEBHOOKS + 1);
        assert_eq!(all[MAX_WEBHOOKS]["name"], "others.fail.mpod.kb.io");
        assert_eq!(all[MAX_WEBHOOKS]["objectSelector"], json!({}));
        let selected = cel::matches(spec_of_all.selector.as_ref().unwrap(), cel::LABELS);
        let condition = json!([{ "name": "selected", "expression": selected }]);
        assert_eq!(all[MAX_WEBHOOKS]["matchConditions"], condition);

        let all = all_with(&spec_of_all, &|name| name != "s299");
        assert_eq!(all.len(), MAX_WEBHOOKS);
        assert_eq!(names(&all).last(), Some(&"s299.mpod.kb.io"));

        let key = |n| format!("{}.k{n}/k", "d".repeat(200));
        let long = (0..250).map(|n| (key(n), "v".repeat(63)));
        let long = spec(json!({ "selector": { "matchLabels": long.collect::<BTreeMap<_, _>>() } }));
        let all = all_with(&long, &|_| false);
        assert!(json!(all).to_string().len() < MAX_BYTES + 4096);
        assert_eq!(names(&all).last(), Some(&"others.fail.mpod.kb.io"));
        assert_eq!(all.last().unwrap()["matchConditions"], Value::Null);
    }

    /// Sets with policy `Ignore`, which select the Pods with these labels.
    fn fail_open_sets(count: usize, with_policy: bool, labels: &dyn Fn(usize) -> Value) -> Vec<SetWebhook> {
        let set = |n: usize| {
            let spec = spec(json!({ "selector": { "matchLabels": labels(n) } }));
            let set = SetWebhook::new("n", &format!("s{n:03}"), None, &spec).unwrap();
            set.with_policy(with_policy)
        };
        (0..count).map(set).collect()
    }

    fn seconds(webhooks: &[Value]) -> u64 {
        let fail_open = webhooks.iter().filter(|one| one["failurePolicy"] == "Ignore");
        let seconds = fail_open.map(|one| one["timeoutSeconds"].as_u64().unwrap());
        seconds
            .inspect(|seconds| assert!((1..=5).contains(seconds)))
            .sum()
    }

    /// The API server calls all that a Pod matches, one after the other.
    #[test]
    fn webhooks_that_fail_open_delay_no_pod_for_long() {
        let for_all = [
            launch_priority_webhook("n"),
            readiness_gate_webhook("n"),
            enhanced_liveness_webhook("n"),
            virtual_node_probes_webhook("n", &BTreeSet::new()),
        ];
        for (count, with_policy, more) in (0..40).map(|n| ([0, 1, 3, 30, 300][n % 5], n % 2 == 0, n / 8)) {
            let sets = fail_open_sets(count, with_policy, &|_| json!({ "app": "web" }));
            let all = pod_webhooks("n", &sets, for_all.iter().take(more).cloned().collect());
            let sum = seconds(&all);
            assert!(sum <= 8, "{count} {with_policy} {more}: {sum} s");
            assert_eq!(
                names(&all).contains(&"others.ignore.mpod.kb.io"),
                count > 8,
                "{all:?}"
            );
        }
        let others = |with_policy| {
            let sets = fail_open_sets(30, with_policy, &|_| json!({ "app": "web" }));
            let all = pod_webhooks("n", &sets, Vec::new());
            all.last().unwrap()["matchConditions"][0]["expression"].to_string()
        };
        assert!(!others(false).contains("s029"));
        // It is for the Pods at which the policy has failed.
        assert!(others(true).contains("s029"), "{}", others(true));
    }

    #[test]
    fn sets_of_different_pods_have_more_time() {
        let different = |n: usize| json!({ "app": n.to_string() });
        let sets = fail_open_sets(50, false, &different);
        let all = pod_webhooks("n", &sets, vec![launch_priority_webhook("n")]);
        assert_eq!((all.len(), seconds(&all)), (51, 51 * 4));
        // A Pod is sent to the first one and another.
        let most = |n: usize| if n == 0 { json!({ "a": "b" }) } else { different(n) };
        let sets = fail_open_sets(50, false, &most);
        let all = pod_webhooks("n", &sets, vec![launch_priority_webhook("n")]);
        assert_eq!((all.len(), seconds(&all)), (51, 51 * 2));
        let in_namespace = |n: usize| {
            let namespaces = json!({ "matchLabels": { keys::NAMESPACE_NAME: n.to_string() } });
            let spec = spec(json!({ "namespaceSelector": namespaces }));
            SetWebhook::new("n", &format!("s{n}"), None, &spec).unwrap()
        };
        let sets: Vec<_> = (0..50).map(in_namespace).collect();
        assert_eq!(seconds(&pod_webhooks("n", &sets, Vec::new())), 50 * 5);
    }
}
