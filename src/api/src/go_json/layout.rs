//! Go structs as data: their JSON fields, in the order in which Go declares them.

use serde_json::{Map, Value};

/// A Go struct: its JSON fields in the order of their declaration.
#[derive(Debug)]
pub struct GoStruct(pub &'static [GoField]);

/// A field of a Go struct.
#[derive(Debug)]
pub struct GoField {
    pub(super) name: &'static str,
    pub(super) value: GoValue,
    pub(super) empty: WhenEmpty,
}

/// What a field holds.
#[derive(Clone, Copy, Debug)]
pub(super) enum GoValue {
    /// A scalar, a map, or a list of these.
    Plain,
    /// A struct, or a list of structs.
    Struct(&'static GoStruct),
    /// A struct whose fields are among those of the outer one.
    Inlined(&'static GoStruct),
    Quantity,
    /// A map of quantities.
    Quantities,
}

/// What is written for a field that is absent or null, or has Go's zero value.
#[derive(Clone, Copy, Debug)]
pub(super) enum WhenEmpty {
    /// Nothing: `omitempty`.
    Omitted,
    /// The zero value, but nothing if absent: `omitempty` of a pointer.
    ZeroKept,
    /// The zero value, and this JSON if absent.
    Written(&'static str),
}

/// A field whose value is a scalar, a map, or a list of these.
#[must_use]
pub const fn scalar(name: &'static str) -> GoField {
    field(name, GoValue::Plain)
}

/// A field whose value is a struct, a pointer to one, or a list of structs.
#[must_use]
pub const fn nested(name: &'static str, layout: &'static GoStruct) -> GoField {
    field(name, GoValue::Struct(layout))
}

/// An embedded struct, whose fields are among those of the outer one.
#[must_use]
pub const fn inlined(layout: &'static GoStruct) -> GoField {
    field("", GoValue::Inlined(layout))
}

/// A field whose value is a quantity. Go never omits it.
#[must_use]
pub const fn quantity(name: &'static str) -> GoField {
    field(name, GoValue::Quantity).or_default_json("\"0\"")
}

/// A field whose value is a map of quantities.
#[must_use]
pub const fn quantities(name: &'static str) -> GoField {
    field(name, GoValue::Quantities)
}

const fn field(name: &'static str, value: GoValue) -> GoField {
    GoField {
        name,
        value,
        empty: WhenEmpty::Omitted,
    }
}

impl GoField {
    /// The same field, written as `json` if it is absent: what Go's `omitempty` does not omit.
    #[must_use]
    pub const fn or_default_json(self, json: &'static str) -> Self {
        Self {
            empty: WhenEmpty::Written(json),
            ..self
        }
    }

    /// The same field as a pointer: `false`, 0 and empty values are written.
    #[must_use]
    pub const fn pointer(self) -> Self {
        Self {
            empty: WhenEmpty::ZeroKept,
            ..self
        }
    }

    /// The value to write, if it is not absent and not omitted.
    pub(super) fn value<'a>(&self, object: &'a Map<String, Value>) -> Option<&'a Value> {
        let value = object.get(self.name).filter(|value| !value.is_null())?;
        let omitted = match (self.empty, self.value, value) {
            (WhenEmpty::Omitted, GoValue::Struct(_), Value::Object(_)) => false,
            (WhenEmpty::Omitted, _, value) => is_zero(value),
            _ => false,
        };
        (!omitted).then_some(value)
    }
}

/// Whether Go's `omitempty` omits the value.
fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}
