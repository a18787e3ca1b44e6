//! The defaults of Kubernetes for containers and volumes, by object and field: one program fills them in, another
//! ignores them in a comparison.

use serde_json::{Map, Value};

use kruise_api::image_reference::ImageReference;

/// Who sets a default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SetBy {
    /// OpenKruise's webhooks, and the API server.
    OpenKruise,
    /// Only the API server.
    ApiServer,
}

/// The default of a field.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FieldDefault {
    field: &'static str,
    value: Literal,
    /// Whether Go has a pointer, so that an empty text and 0 are values of their own.
    pointer: bool,
}

#[derive(Clone, Copy, Debug)]
enum Literal {
    Text(&'static str),
    Number(i64),
    False,
}

/// Receives an object, and the defaults of its fields.
pub(crate) type Visitor<'a> = dyn FnMut(&mut Map<String, Value>, &[FieldDefault], SetBy) + 'a;

pub(crate) const fn text(field: &'static str, value: &'static str) -> FieldDefault {
    FieldDefault {
        field,
        value: Literal::Text(value),
        pointer: false,
    }
}

const fn number(field: &'static str, value: i64) -> FieldDefault {
    FieldDefault {
        field,
        value: Literal::Number(value),
        pointer: false,
    }
}

const fn unset(field: &'static str) -> FieldDefault {
    FieldDefault {
        field,
        value: Literal::False,
        pointer: true,
    }
}

impl FieldDefault {
    const fn pointer(self) -> Self {
        Self {
            pointer: true,
            ..self
        }
    }

    fn value(&self) -> Value {
        match self.value {
            Literal::Text(text) => text.into(),
            Literal::Number(number) => number.into(),
            Literal::False => false.into(),
        }
    }

    /// Sets the field if Go's type has no value there.
    pub(crate) fn fill(&self, object: &mut Map<String, Value>) {
        let absent = match object.get(self.field) {
            None | Some(Value::Null) => true,
            Some(Value::String(text)) => text.is_empty() && !self.pointer,
            Some(Value::Number(number)) => number.as_i64() == Some(0) && !self.pointer,
            Some(_) => false,
        };
        if absent {
            object.insert(self.field.to_owned(), self.value());
        }
    }

    /// Removes the field if it has its default.
    pub(crate) fn remove(&self, object: &mut Map<String, Value>) {
        if object.get(self.field) == Some(&self.value()) {
            object.remove(self.field);
        }
    }
}

const CONTAINER: [FieldDefault; 2] = [
    text("terminationMessagePath", "/dev/termination-log"),
    text("terminationMessagePolicy", "File"),
];
const PORT: [FieldDefault; 1] = [text("protocol", "TCP")];
/// `v1.ObjectFieldSelector`.
pub(crate) const FIELD_REF: [FieldDefault; 1] = [text("apiVersion", "v1")];
const FILE_KEY_REF: [FieldDefault; 1] = [unset("optional")];
const PROBE: [FieldDefault; 4] = [
    number("timeoutSeconds", 1),
    number("periodSeconds", 10),
    number("successThreshold", 1),
    number("failureThreshold", 3),
];
const HTTP_GET: [FieldDefault; 2] = [text("path", "/"), text("scheme", "HTTP")];
const FILE_MODE: [FieldDefault; 1] = [number("defaultMode", 0o644).pointer()];
const TOKEN: [FieldDefault; 1] = [number("expirationSeconds", 3600).pointer()];
const CLAIM: [FieldDefault; 1] = [text("volumeMode", "Filesystem").pointer()];
/// Kinds of volumes with constant defaults.
const VOLUMES: [(&str, SetBy, &[FieldDefault]); 9] = [
    ("hostPath", SetBy::OpenKruise, &[text("type", "").pointer()]),
    ("secret", SetBy::OpenKruise, &FILE_MODE),
    ("configMap", SetBy::OpenKruise, &FILE_MODE),
    ("downwardAPI", SetBy::OpenKruise, &FILE_MODE),
    ("projected", SetBy::OpenKruise, &FILE_MODE),
    ("iscsi", SetBy::ApiServer, &[text("iscsiInterface", "default")]),
    (
        "rbd",
        SetBy::ApiServer,
        &[
            text("pool", "rbd"),
            text("user", "admin"),
            text("keyring", "/etc/ceph/keyring"),
        ],
    ),
    (
        "azureDisk",
        SetBy::ApiServer,
        &[
            text("cachingMode", "ReadWrite").pointer(),
            text("fsType", "ext4").pointer(),
            unset("readOnly"),
            text("kind", "Shared").pointer(),
        ],
    ),
    (
        "scaleIO",
        SetBy::ApiServer,
        &[text("storageMode", "ThinProvisioned"), text("fsType", "xfs")],
    ),
];

/// Visits the objects of a container that have defaults. Its pull policy is not among them: it depends on the image,
/// and for some workloads on the webhook.
pub(crate) fn visit_container(container: &mut Map<String, Value>, visit: &mut Visitor<'_>) {
    use SetBy::{ApiServer, OpenKruise};
    visit(container, &CONTAINER, OpenKruise);
    for port in items(container, "ports").filter_map(Value::as_object_mut) {
        visit(port, &PORT, OpenKruise);
    }
    for from in env_sources(container) {
        visit_reference(from, visit);
        if let Some(file) = fields(from, "fileKeyRef") {
            visit(file, &FILE_KEY_REF, ApiServer);
        }
    }
    for (name, by) in [
        ("livenessProbe", OpenKruise),
        ("readinessProbe", OpenKruise),
        ("startupProbe", ApiServer),
    ] {
        if let Some(probe) = fields(container, name) {
            visit(probe, &PROBE, by);
            visit_http_get(probe, by, visit);
        }
    }
    for name in ["postStart", "preStop"] {
        let hooks = fields(container, "lifecycle");
        if let Some(hook) = hooks.and_then(|hooks| fields(hooks, name)) {
            visit_http_get(hook, OpenKruise, visit);
        }
    }
}

fn visit_http_get(handler: &mut Map<String, Value>, by: SetBy, visit: &mut Visitor<'_>) {
    if let Some(get) = fields(handler, "httpGet") {
        visit(get, &HTTP_GET, by);
    }
}

/// Visits `fieldRef`, as environment variables and files have it.
fn visit_reference(from: &mut Map<String, Value>, visit: &mut Visitor<'_>) {
    if let Some(field) = fields(from, "fieldRef") {
        visit(field, &FIELD_REF, SetBy::OpenKruise);
    }
}

/// Visits the objects of a volume that have defaults. A volume without a source is an `emptyDir`, which is up to the
/// caller.
pub(crate) fn visit_volume(volume: &mut Map<String, Value>, visit: &mut Visitor<'_>) {
    for (kind, by, defaults) in VOLUMES {
        if let Some(source) = fields(volume, kind) {
            visit(source, defaults, by);
        }
    }
    if let Some(image) = fields(volume, "image") {
        let policy = pull_policy(image.get("reference"));
        visit(image, &[text("pullPolicy", policy)], SetBy::ApiServer);
    }
    for_each_file(volume, &mut |file| visit_reference(file, visit));
    for source in projected_sources(volume) {
        if let Some(token) = fields(source, "serviceAccountToken") {
            visit(token, &TOKEN, SetBy::OpenKruise);
        }
    }
    if let Some(claim) = ephemeral_claim(volume) {
        visit(claim, &CLAIM, SetBy::ApiServer);
    }
}

/// The default pull policy of Kubernetes, by the image's tag.
pub(crate) fn pull_policy(image: Option<&Value>) -> &'static str {
    let image = ImageReference::parse(image.and_then(Value::as_str).unwrap_or_default());
    let tag = image.as_ref().ok().and_then(|image| match image.tag() {
        None if image.digest().is_none() => Some("latest"),
        tag => tag,
    });
    if tag == Some("latest") {
        "Always"
    } else {
        "IfNotPresent"
    }
}

/// The sources of a container's environment variables: `valueFrom`.
pub(crate) fn env_sources(
    container: &mut Map<String, Value>,
) -> impl Iterator<Item = &mut Map<String, Value>> {
    items(container, "env").filter_map(|variable| variable.get_mut("valueFrom")?.as_object_mut())
}

/// Calls `each` with the files of a volume that have fields of the Pod as their contents.
pub(crate) fn for_each_file(volume: &mut Map<String, Value>, each: &mut dyn FnMut(&mut Map<String, Value>)) {
    if let Some(files) = fields(volume, "downwardAPI") {
        items(files, "items")
            .filter_map(Value::as_object_mut)
            .for_each(&mut *each);
    }
    for source in projected_sources(volume) {
        if let Some(files) = fields(source, "downwardAPI") {
            items(files, "items")
                .filter_map(Value::as_object_mut)
                .for_each(&mut *each);
        }
    }
}

fn projected_sources(volume: &mut Map<String, Value>) -> impl Iterator<Item = &mut Map<String, Value>> {
    let projected = fields(volume, "projected").into_iter();
    projected
        .flat_map(|projected| items(projected, "sources"))
        .filter_map(Value::as_object_mut)
}

/// The spec of a volume's claim template.
pub(crate) fn ephemeral_claim(volume: &mut Map<String, Value>) -> Option<&mut Map<String, Value>> {
    fields(
        fields(fields(volume, "ephemeral")?, "volumeClaimTemplate")?,
        "spec",
    )
}

/// The object of that name.
pub(crate) fn fields<'a>(
    object: &'a mut Map<String, Value>,
    name: &str,
) -> Option<&'a mut Map<String, Value>> {
    object.get_mut(name)?.as_object_mut()
}

/// The items of the list of that name.
pub(crate) fn items<'a>(
    object: &'a mut Map<String, Value>,
    list: &str,
) -> impl Iterator<Item = &'a mut Value> + use<'a> {
    let items = object.get_mut(list).and_then(Value::as_array_mut);
    items.into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pull_policy_depends_on_the_tag() {
        let digest = format!("sha256:{}", "0".repeat(64));
        for (image, policy) in [
            (json!("nginx"), "Always"),
            (json!("reg.io:5000/a/b"), "Always"),
            (json!("nginx:latest"), "Always"),
            (json!(format!("nginx:latest@{digest}")), "Always"),
            (json!(format!("nginx@{digest}")), "IfNotPresent"),
            (json!("nginx:1"), "IfNotPresent"),
            (json!("Not Valid"), "IfNotPresent"),
            (json!(""), "IfNotPresent"),
            (json!(1), "IfNotPresent"),
        ] {
            assert_eq!(pull_policy(Some(&image)), policy, "{image}");
        }
        assert_eq!(pull_policy(None), "IfNotPresent");
    }

    #[test]
    fn zero_is_a_value_of_pointers_only() {
        let fill = |default: FieldDefault, value: Value| {
            let mut object = Map::from_iter([("x".to_owned(), value)]);
            default.fill(&mut object);
            object.remove("x").unwrap_or_default()
        };
        for (value, plain, pointer) in [
            (json!(null), json!(7), json!(7)),
            (json!(0), json!(7), json!(0)),
            (json!(""), json!(7), json!("")),
            (json!(2), json!(2), json!(2)),
            (json!([]), json!([]), json!([])),
        ] {
            assert_eq!(fill(number("x", 7), value.clone()), plain);
            assert_eq!(fill(number("x", 7).pointer(), value), pointer);
        }
    }
}
