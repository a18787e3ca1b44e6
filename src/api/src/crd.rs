//! The CustomResourceDefinitions, built from the types, the rules and the columns below.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Map, Value, json};

use super::json::set;
use super::rules::{self, RulesAtPath, SchemaRule};
use super::{
    Kind, V1ALPHA1, V1BETA1, cloneset, container_recreate_job, container_recreate_request,
    image_list_pull_job, image_pull_job, keys, node_image, node_pod_probe, pod_probe_marker, sidecarset,
    v1alpha1,
};

/// Name, type, JSON path and description of a printer column.
type Column = (&'static str, &'static str, &'static str, &'static str);

const AGE: Column = (
    "AGE",
    "date",
    ".metadata.creationTimestamp",
    "Time since creation",
);

const CONDITION_REASON: Column = (
    "REASON",
    "string",
    r#".status.conditions[?(@.status=="True")].reason"#,
    "Reason of the condition that is true",
);

const CONDITION_MESSAGE: Column = (
    "MESSAGE",
    "string",
    r#".status.conditions[?(@.status=="True")].message"#,
    "Message of the condition that is true",
);

const NODE_IMAGE_COLUMNS: &[Column] = &[
    ("DESIRED", "integer", ".status.desired", "Tags requested"),
    ("PULLING", "integer", ".status.pulling", "Tags being pulled"),
    ("SUCCEED", "integer", ".status.succeeded", "Tags pulled"),
    ("FAILED", "integer", ".status.failed", "Tags that failed"),
    AGE,
    (
        "PROGRESS",
        "string",
        ".status.progress",
        "Bytes of the tags that are being pulled",
    ),
];

const IMAGE_PULL_JOB_COLUMNS: &[Column] = &[
    ("TOTAL", "integer", ".status.desired", "Nodes the job is for"),
    ("ACTIVE", "integer", ".status.active", "Nodes that pull"),
    (
        "SUCCEED",
        "integer",
        ".status.succeeded",
        "Nodes that have the image",
    ),
    ("FAILED", "integer", ".status.failed", "Nodes that failed"),
    AGE,
    (
        "MESSAGE",
        "string",
        ".status.message",
        "Status message of the job",
    ),
    (
        "PROGRESS",
        "string",
        ".status.progress",
        "Bytes of the image that the nodes have together",
    ),
];

/// Columns of `kubectl get -o wide`. v1alpha1 has a different MESSAGE.
const IMAGE_PULL_JOB_WIDE: &[Column] = &[
    ("IMAGE", "string", ".spec.image", "Image to pull"),
    CONDITION_REASON,
    CONDITION_MESSAGE,
];

const IMAGE_LIST_PULL_JOB_COLUMNS: &[Column] = &[
    ("TOTAL", "integer", ".status.desired", "Images of the job"),
    (
        "SUCCEEDED",
        "integer",
        ".status.succeeded",
        "Images that all nodes have",
    ),
    (
        "COMPLETED",
        "integer",
        ".status.completed",
        "Images whose ImagePullJobs have ended",
    ),
    AGE,
];

/// Columns of `kubectl get -o wide`.
const IMAGE_LIST_PULL_JOB_WIDE: &[Column] = &[CONDITION_REASON, CONDITION_MESSAGE];

/// Columns of `kubectl get -o wide`.
const NODE_IMAGE_WIDE: &[Column] = &[(
    "MESSAGE",
    "string",
    r#".status.imageStatuses.*.tags[?(@.phase=="Failed")].message"#,
    "Message of the first tag that failed",
)];

const CONTAINER_RECREATE_REQUEST_COLUMNS: &[Column] = &[
    ("PHASE", "string", ".status.phase", "Phase of the request"),
    ("POD", "string", ".spec.podName", "Name of the Pod"),
    (
        "NODE",
        "string",
        r".metadata.labels.crr\.apps\.kruise\.io/node-name",
        "Node of the Pod",
    ),
    AGE,
];

/// Columns of `kubectl get -o wide`: the condition that is ours.
const CONTAINER_RECREATE_REQUEST_WIDE: &[Column] = &[
    (
        "RESULT",
        "string",
        r#".status.conditions[?(@.type!="PreRecreateGrace")].type"#,
        "Waiting, Complete or Failed",
    ),
    (
        "MESSAGE",
        "string",
        r#".status.conditions[?(@.type!="PreRecreateGrace")].message"#,
        "What the request waits for, or how it ended",
    ),
];

/// The same for v1alpha1, whose status has no conditions.
const CONTAINER_RECREATE_REQUEST_WIDE_ALPHA: &[Column] = &[(
    "MESSAGE",
    "string",
    ".status.message",
    "What the request waits for, or why it failed",
)];

const CONTAINER_RECREATE_JOB_COLUMNS: &[Column] = &[
    (
        "DESIRED",
        "integer",
        ".status.desired",
        "Pods that were or will be restarted",
    ),
    (
        "RESTARTED",
        "integer",
        ".status.restarted",
        "Pods that were restarted",
    ),
    (
        "ACTIVE",
        "integer",
        ".status.active",
        "Pods that are being restarted",
    ),
    ("FAILED", "integer", ".status.failed", "Pods that failed"),
    (
        "RESULT",
        "string",
        r#".status.conditions[?(@.status=="True")].type"#,
        "Waiting, Complete or Failed",
    ),
    AGE,
];

/// Columns of `kubectl get -o wide`.
const CONTAINER_RECREATE_JOB_WIDE: &[Column] = &[CONDITION_REASON, CONDITION_MESSAGE];

const CLONE_SET_COLUMNS: &[Column] = &[
    ("DESIRED", "integer", ".spec.replicas", "Desired number of Pods"),
    (
        "UPDATED",
        "integer",
        ".status.updatedReplicas",
        "Pods of the update revision",
    ),
    (
        "UPDATED_READY",
        "integer",
        ".status.updatedReadyReplicas",
        "Pods of the update revision that are ready",
    ),
    (
        "UPDATED_AVAILABLE",
        "integer",
        ".status.updatedAvailableReplicas",
        "Pods of the update revision that were ready for minReadySeconds",
    ),
    ("READY", "integer", ".status.readyReplicas", "Pods that are ready"),
    ("TOTAL", "integer", ".status.replicas", "Current number of Pods"),
    AGE,
];

/// Columns of `kubectl get -o wide`.
const CLONE_SET_WIDE: &[Column] = &[
    (
        "CONTAINERS",
        "string",
        ".spec.template.spec.containers[*].name",
        "Name of the first container",
    ),
    (
        "IMAGES",
        "string",
        ".spec.template.spec.containers[*].image",
        "Image of the first container",
    ),
    (
        "SELECTOR",
        "string",
        ".status.labelSelector",
        "Label selector for the Pods",
    ),
    (
        "REASON",
        "string",
        r#".status.conditions[?(@.type=="Waiting")].reason"#,
        "Reason why the CloneSet waits",
    ),
    (
        "MESSAGE",
        "string",
        r#".status.conditions[?(@.type=="Waiting")].message"#,
        "What it waits for",
    ),
];

const SIDECAR_SET_COLUMNS: &[Column] = &[
    (
        "MATCHED",
        "integer",
        ".status.matchedPods",
        "Pods that have the containers",
    ),
    (
        "UPDATED",
        "integer",
        ".status.updatedPods",
        "Pods that have the current ones",
    ),
    ("READY", "integer", ".status.readyPods", "Pods that are ready"),
    AGE,
];

const POD_PROBE_MARKER_COLUMNS: &[Column] = &[
    (
        "MATCHED",
        "integer",
        ".status.matchedPods",
        "Pods that are probed",
    ),
    AGE,
];

/// Columns of `kubectl get -o wide`.
const SIDECAR_SET_WIDE: &[Column] = &[
    (
        "NOT_INJECTED",
        "integer",
        ".status.notInjectedPods",
        "Selected Pods without the containers",
    ),
    (
        "REASON",
        "string",
        r#".status.conditions[?(@.type=="Waiting")].reason"#,
        "Reason why the update waits",
    ),
    (
        "MESSAGE",
        "string",
        r#".status.conditions[?(@.type=="Waiting")].message"#,
        "What it waits for",
    ),
];

/// Parts of a kind's CRD.
struct CrdDefinition {
    kind: Kind,
    /// The definition of each version, the stored one last.
    versions: Vec<CustomResourceDefinition>,
    columns: &'static [Column],
    wide: &'static [Column],
    /// The same for v1alpha1, if they differ.
    wide_alpha: Option<&'static [Column]>,
    /// Rules for both versions.
    rules: &'static [SchemaRule],
    /// Rules for one version, by its name.
    version_rules: &'static [(&'static str, &'static [RulesAtPath])],
    /// Whether an object without `spec` is valid and empty, rather than an error.
    spec_is_optional: bool,
    /// Whether it has replicas, and so the scale subresource.
    has_scale: bool,
}

/// The CustomResourceDefinitions of all kinds, as installed: all versions served, the newest stored.
///
/// There is no `caBundle`: the manager fills it in at run time, and since the manifest never has the field, applying
/// the manifest again does not clear it.
pub fn crds() -> Vec<CustomResourceDefinition> {
    Kind::ALL.into_iter().filter_map(crd).collect()
}

/// The CustomResourceDefinition of a kind. The programs do not need it: schemas are large.
pub fn crd(kind: Kind) -> Option<CustomResourceDefinition> {
    serde_json::from_value(definition(kind).manifest()?).ok()
}

fn definition(kind: Kind) -> CrdDefinition {
    match kind {
        Kind::CloneSet => clone_sets(),
        Kind::ContainerRecreateRequest => container_recreate_requests(),
        Kind::ContainerRecreateJob => container_recreate_jobs(),
        Kind::ImagePullJob => image_pull_jobs(),
        Kind::ImageListPullJob => image_list_pull_jobs(),
        Kind::NodeImage => node_images(),
        Kind::SidecarSet => sidecar_sets(),
        Kind::NodePodProbe => node_pod_probes(),
        Kind::PodProbeMarker => pod_probe_markers(),
    }
}

fn clone_sets() -> CrdDefinition {
    CrdDefinition {
        wide: CLONE_SET_WIDE,
        version_rules: &[
            (
                V1BETA1,
                &[
                    ("", rules::cloneset::V1BETA1),
                    (
                        "spec.updateStrategy.rollingUpdate",
                        rules::cloneset::UPDATE_LIMITS,
                    ),
                    (
                        "spec.updateStrategy.rollingUpdate",
                        rules::cloneset::PRIORITY_LIMITS,
                    ),
                ],
            ),
            (
                V1ALPHA1,
                &[
                    ("", rules::cloneset::V1ALPHA1),
                    ("spec.updateStrategy", rules::cloneset::UPDATE_LIMITS),
                    ("spec.updateStrategy", rules::cloneset::PRIORITY_LIMITS),
                ],
            ),
        ],
        has_scale: true,
        ..CrdDefinition::with_defaults(
            Kind::CloneSet,
            vec![v1alpha1::CloneSet::crd(), cloneset::CloneSet::crd()],
            CLONE_SET_COLUMNS,
            rules::cloneset::ALL_VERSIONS,
        )
    }
}

fn container_recreate_requests() -> CrdDefinition {
    CrdDefinition {
        wide: CONTAINER_RECREATE_REQUEST_WIDE,
        wide_alpha: Some(CONTAINER_RECREATE_REQUEST_WIDE_ALPHA),
        ..CrdDefinition::with_defaults(
            Kind::ContainerRecreateRequest,
            vec![
                v1alpha1::ContainerRecreateRequest::crd(),
                container_recreate_request::ContainerRecreateRequest::crd(),
            ],
            CONTAINER_RECREATE_REQUEST_COLUMNS,
            rules::CONTAINER_RECREATE_REQUEST,
        )
    }
}

fn container_recreate_jobs() -> CrdDefinition {
    CrdDefinition {
        wide: CONTAINER_RECREATE_JOB_WIDE,
        version_rules: &[(
            V1ALPHA1,
            &[
                ("", rules::container_recreate_job::RULES),
                ("spec", rules::cloneset::PRIORITY_LIMITS),
            ],
        )],
        ..CrdDefinition::with_defaults(
            Kind::ContainerRecreateJob,
            vec![container_recreate_job::ContainerRecreateJob::crd()],
            CONTAINER_RECREATE_JOB_COLUMNS,
            &[],
        )
    }
}

fn image_pull_jobs() -> CrdDefinition {
    CrdDefinition {
        wide: IMAGE_PULL_JOB_WIDE,
        version_rules: &[
            (V1BETA1, &[("", rules::IMAGE_PULL_JOB)]),
            (V1ALPHA1, &[("", rules::IMAGE_PULL_JOB)]),
        ],
        ..CrdDefinition::with_defaults(
            Kind::ImagePullJob,
            vec![v1alpha1::ImagePullJob::crd(), image_pull_job::ImagePullJob::crd()],
            IMAGE_PULL_JOB_COLUMNS,
            rules::IMAGE_PULL_JOB_TEMPLATE,
        )
    }
}

fn image_list_pull_jobs() -> CrdDefinition {
    CrdDefinition {
        wide: IMAGE_LIST_PULL_JOB_WIDE,
        version_rules: &[
            (V1BETA1, &[("", rules::IMAGE_LIST_PULL_JOB)]),
            (V1ALPHA1, &[("", rules::IMAGE_LIST_PULL_JOB)]),
        ],
        ..CrdDefinition::with_defaults(
            Kind::ImageListPullJob,
            vec![
                v1alpha1::ImageListPullJob::crd(),
                image_list_pull_job::ImageListPullJob::crd(),
            ],
            IMAGE_LIST_PULL_JOB_COLUMNS,
            rules::IMAGE_PULL_JOB_TEMPLATE,
        )
    }
}

fn node_images() -> CrdDefinition {
    CrdDefinition {
        spec_is_optional: true,
        wide: NODE_IMAGE_WIDE,
        ..CrdDefinition::with_defaults(
            Kind::NodeImage,
            vec![v1alpha1::NodeImage::crd(), node_image::NodeImage::crd()],
            NODE_IMAGE_COLUMNS,
            rules::NODE_IMAGE,
        )
    }
}

fn sidecar_sets() -> CrdDefinition {
    CrdDefinition {
        wide: SIDECAR_SET_WIDE,
        ..CrdDefinition::with_defaults(
            Kind::SidecarSet,
            vec![v1alpha1::SidecarSet::crd(), sidecarset::SidecarSet::crd()],
            SIDECAR_SET_COLUMNS,
            rules::sidecarset::ALL_VERSIONS,
        )
    }
}

fn node_pod_probes() -> CrdDefinition {
    CrdDefinition {
        spec_is_optional: true,
        ..CrdDefinition::with_defaults(
            Kind::NodePodProbe,
            vec![node_pod_probe::NodePodProbe::crd()],
            &[],
            rules::NODE_POD_PROBE,
        )
    }
}

fn pod_probe_markers() -> CrdDefinition {
    CrdDefinition::with_defaults(
        Kind::PodProbeMarker,
        vec![pod_probe_marker::PodProbeMarker::crd()],
        POD_PROBE_MARKER_COLUMNS,
        rules::pod_probe_marker::RULES,
    )
}

impl CrdDefinition {
    fn with_defaults(
        kind: Kind,
        versions: Vec<CustomResourceDefinition>,
        columns: &'static [Column],
        rules: &'static [SchemaRule],
    ) -> Self {
        Self {
            kind,
            versions,
            columns,
            wide: &[],
            wide_alpha: None,
            rules,
            version_rules: &[],
            spec_is_optional: false,
            has_scale: false,
        }
    }

    /// The rules of a version, each with the path that its own is relative to.
    fn rules(&self, version: &str) -> impl Iterator<Item = (&'static str, &'static SchemaRule)> {
        let own = self
            .version_rules
            .iter()
            .filter(move |(name, _)| *name == version);
        let below = own.flat_map(|(_, below)| below.iter());
        let own = below.flat_map(|(path, rules)| rules.iter().map(move |rule| (*path, rule)));
        self.rules.iter().map(|rule| ("", rule)).chain(own)
    }

    fn manifest(&self) -> Option<Value> {
        let stored = self.versions.last()?;
        let names = &stored.spec.names;
        let versions = self.versions.iter().zip(self.kind.info().versions);
        let versions = versions.map(|(crd, name)| self.version(crd, name));
        let mut spec = json!({
            "group": stored.spec.group,
            "scope": stored.spec.scope,
            "names": {
                "kind": names.kind,
                "listKind": format!("{}List", names.kind),
                "plural": names.plural,
                "singular": names.singular,
            },
            "versions": versions.collect::<Vec<_>>(),
            "conversion": { "strategy": "None" },
        });
        if let Some(short) = names.short_names.as_ref().filter(|short| !short.is_empty()) {
            set(&mut spec, &["names", "shortNames"], json!(short));
        }
        if self.kind.info().needs_conversion {
            let conversion = json!({
                "strategy": "Webhook",
                "webhook": {
                    "conversionReviewVersions": ["v1"],
                    "clientConfig": { "service": {
                        "namespace": keys::SYSTEM_NAMESPACE,
                        "name": keys::WEBHOOK_SERVICE,
                        "path": keys::CONVERT_PATH,
                    } },
                },
            });
            set(&mut spec, &["conversion"], conversion);
        }
        Some(json!({
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": { "name": stored.metadata.name },
            "spec": spec,
        }))
    }

    fn version(&self, crd: &CustomResourceDefinition, name: &str) -> Value {
        let derived = crd
            .spec
            .versions
            .first()
            .and_then(|version| version.schema.as_ref());
        let mut schema = derived
            .and_then(|schema| serde_json::to_value(&schema.open_api_v3_schema).ok())
            .unwrap_or_default();
        normalize_schema(&mut schema);
        self.complete_root(&mut schema);
        for (below, rule) in self.rules(name) {
            add_rule(&mut schema, below, rule);
        }
        let mut subresources = json!({ "status": {} });
        if self.has_scale {
            let scale = json!({
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.labelSelector",
            });
            set(&mut subresources, &["scale"], scale);
        }
        let mut version = json!({
            "name": name,
            "served": true,
            "storage": self.kind.info().versions.last() == Some(&name),
            "schema": { "openAPIV3Schema": schema },
            "subresources": subresources,
        });
        let columns = self.all_columns(name);
        if !columns.is_empty() {
            set(&mut version, &["additionalPrinterColumns"], columns.into());
        }
        version
    }

    fn all_columns(&self, version: &str) -> Vec<Value> {
        let column = |(name, type_, path, description): &Column| json!({ "name": name, "type": type_, "jsonPath": path, "description": description });
        let usual = self
            .columns
            .iter()
            .filter(|(column, ..)| *column != "MESSAGE" || version == V1ALPHA1);
        let is_duplicate =
            |name: &str| version == V1ALPHA1 && self.columns.iter().any(|(usual, ..)| *usual == name);
        let wide = self
            .wide_alpha
            .filter(|_| version == V1ALPHA1)
            .unwrap_or(self.wide);
        let wide = wide.iter().filter(|(name, ..)| !is_duplicate(name)).map(|wide| {
            let mut column = column(wide);
            set(&mut column, &["priority"], json!(1));
            column
        });
        usual.map(column).chain(wide).collect()
    }

    fn complete_root(&self, schema: &mut Value) {
        let text = |description: &str| json!({ "type": "string", "description": description });
        for (field, is) in [
            ("apiVersion", text("Group and version of this object.")),
            ("kind", text("Kind of this object.")),
            ("metadata", json!({ "type": "object" })),
        ] {
            set(schema, &["properties", field], is);
        }
        if self.spec_is_optional {
            set(schema, &["properties", "spec", "default"], json!({}));
            if let Some(root) = schema.as_object_mut() {
                root.remove("required");
            }
        }
    }
}

/// Adapts a derived schema: no nulls (absence means the same), and only the defaults that this file and `schemas` set
/// explicitly, not those of Rust's empty values. Int-or-string is written the way Kubernetes' own tools do.
fn normalize_schema(schema: &mut Value) {
    let Some(node) = schema.as_object_mut() else {
        return;
    };
    node.remove("nullable");
    if node.get("default").is_some_and(|default| *default != "TCP") {
        node.remove("default");
    }
    if let Some(Value::Array(values)) = node.get_mut("enum") {
        values.retain(|word| !word.is_null());
    }
    // The API server accepts any integer whatever the format is, and clients could not read the object.
    if node.get("format").is_some_and(|format| format == "int32") {
        for (limit, value) in [("minimum", i32::MIN), ("maximum", i32::MAX)] {
            node.entry(limit).or_insert(json!(value));
        }
    }
    if node.get("x-kubernetes-int-or-string").is_some() {
        node.insert(
            "anyOf".into(),
            json!([{ "type": "integer" }, { "type": "string" }]),
        );
    }
    for_each_child(node, normalize_schema);
}

/// Calls `with` for each direct child schema of `node`.
fn for_each_child(node: &mut Map<String, Value>, mut with: impl FnMut(&mut Value)) {
    if let Some(Value::Object(properties)) = node.get_mut("properties") {
        properties.values_mut().for_each(&mut with);
    }
    for key in ["items", "additionalProperties"] {
        if let Some(child) = node.get_mut(key) {
            with(child);
        }
    }
}

/// Adds a rule at its path, relative to `below`.
fn add_rule(schema: &mut Value, below: &str, rule: &SchemaRule) {
    let mut at = schema;
    let steps = below.split('.').chain(rule.path.split('.'));
    for step in steps.filter(|step| !step.is_empty()) {
        let below = match step {
            "[]" => at.get_mut("items"),
            "{}" => at.get_mut("additionalProperties"),
            name => at.get_mut("properties").and_then(|fields| fields.get_mut(name)),
        };
        let Some(below) = below else { return };
        at = below;
    }
    let (Value::Object(node), Value::Object(additions)) = (at, (rule.add)()) else {
        return;
    };
    for (key, value) in additions {
        match (node.get_mut(&key), value) {
            (Some(Value::Array(there)), Value::Array(more)) if key.starts_with("x-") => there.extend(more),
            (_, value) => {
                node.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests;
